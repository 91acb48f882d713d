// The contract without Python: every instruction set against a loop in double precision.

#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"
#include "wmtp/attention.hpp"
#include "wmtp/host.hpp"
#include "wmtp/ring.hpp"

namespace
{

constexpr int kQueryHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 24;
constexpr int kRowElements = kKvHeads * kHeadDim;

std::vector<float> random_floats(size_t n)
{
    static std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& value : values)
    {
        value = normal(generator);
    }
    return values;
}

double reference(std::vector<float> const& q, std::vector<float> const& k, std::vector<float> const& v, int head, int d,
    int64_t query, int64_t n_sink, int64_t window, double scale)
{
    int const kv_head = head / (kQueryHeads / kKvHeads);
    double sum = 0.0;
    double weighted = 0.0;
    for (int64_t p = 0; p <= query; ++p)
    {
        if (p >= n_sink && p <= query - window)
        {
            continue;
        }
        double score = 0.0;
        for (int i = 0; i < kHeadDim; ++i)
        {
            score += static_cast<double>(q[head * kHeadDim + i]) * k[p * kRowElements + kv_head * kHeadDim + i];
        }
        double const weight = std::exp(score * scale);
        sum += weight;
        weighted += weight * v[p * kRowElements + kv_head * kHeadDim + d];
    }
    return weighted / sum;
}

void windowed_rows_match_at(int64_t query)
{
    int64_t const n_sink = 3;
    int64_t const window = 17;
    int64_t const capacity = n_sink + window + 4;
    auto const n_rows = static_cast<int32_t>(query + 1);
    std::vector<float> const k = random_floats(n_rows * kRowElements);
    std::vector<float> const v = random_floats(n_rows * kRowElements);
    std::vector<float> const q = random_floats(kQueryHeads * kHeadDim);
    std::vector<float> ring_k(capacity * kRowElements, std::nanf(""));
    std::vector<float> ring_v(capacity * kRowElements, std::nanf(""));
    std::vector<float> out(q.size());
    int32_t const row_offsets[] = {0, n_rows};
    int32_t const query_offsets[] = {0, 1};
    int64_t const start = 0;
    int32_t const lane = 0;
    wmtp::windowed_draft_attention({q.data(), wmtp::DType::kFloat32},
        {{k.data(), wmtp::DType::kFloat32}, {v.data(), wmtp::DType::kFloat32}, {row_offsets, 1, n_rows}, &start},
        {query_offsets, 1, 1}, {kQueryHeads, kKvHeads, kHeadDim},
        {{ring_k.data(), wmtp::DType::kFloat32}, {ring_v.data(), wmtp::DType::kFloat32}, 1, capacity, n_sink}, &lane,
        window, 0.2F, {nullptr, 0}, {out.data(), wmtp::DType::kFloat32}, 2);
    for (int head = 0; head < kQueryHeads; ++head)
    {
        for (int d = 0; d < kHeadDim; ++d)
        {
            double const expected = reference(q, k, v, head, d, query, n_sink, window, 0.2);
            WMTP_CHECK(std::fabs(out[head * kHeadDim + d] - expected) < 1e-5);
        }
    }
}

} // namespace

int main()
{
    for (std::string const& isa : wmtp::available_isas())
    {
        wmtp::set_isa(isa);
        for (int64_t query : {0, 2, 3, 16, 17, 19, 20, 24, 63, 64, 200, 2100})
        {
            windowed_rows_match_at(query);
        }
    }
    return 0;
}

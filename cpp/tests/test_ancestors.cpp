// The ancestor mask against a list of rows.

#include <cstdint>
#include <vector>

#include "check.hpp"
#include "wmtp/ancestors.hpp"

namespace
{

void words_hold(std::vector<int64_t> const& ancestors, int32_t n_words)
{
    std::vector<uint32_t> words(static_cast<size_t>(n_words), 0);
    for (int64_t const row : ancestors)
    {
        words[static_cast<size_t>(row / 32)] += uint32_t{1} << (row % 32);
    }
    int64_t last = -1;
    for (int64_t row = 0; row < n_words * 32; ++row)
    {
        int32_t before = 0;
        bool listed = false;
        for (int64_t const ancestor : ancestors)
        {
            before += ancestor < row ? 1 : 0;
            listed = listed || ancestor == row;
        }
        WMTP_CHECK(wmtp::is_ancestor(words.data(), row) == listed);
        WMTP_CHECK(wmtp::count_ancestors(words.data(), row) == before);
        last = listed ? row : last;
    }
    WMTP_CHECK(wmtp::ancestors_end(words.data(), n_words) == last + 1);
}

} // namespace

int main()
{
    words_hold({}, 1);
    words_hold({0}, 1);
    words_hold({31}, 1);
    words_hold({0, 5, 31}, 3);
    words_hold({0, 32}, 2);
    words_hold({0, 30, 33, 63, 64, 95}, 3);
    return 0;
}

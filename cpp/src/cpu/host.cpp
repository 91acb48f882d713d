#include "wmtp/host.hpp"

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "checks.hpp"
#include "kernels.hpp"

namespace wmtp
{
namespace cpu
{
namespace
{

std::vector<KernelTable const*> supported_tables()
{
    std::vector<KernelTable const*> tables{&kGenericKernels};
#if defined(WMTP_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    {
        tables.push_back(&kAvx2Kernels);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    {
        tables.push_back(&kAvx512Kernels);
#if defined(WMTP_AVX512BF16)
        if (__builtin_cpu_supports("avx512bf16"))
        {
            tables.push_back(&kAvx512Bf16Kernels);
        }
#endif
    }
#endif
    return tables;
}

std::vector<KernelTable const*> const& tables()
{
    static std::vector<KernelTable const*> const all = supported_tables();
    return all;
}

std::atomic<KernelTable const*>& chosen()
{
    static std::atomic<KernelTable const*> table{tables().back()};
    return table;
}

} // namespace

KernelTable const& kernels()
{
    return *chosen().load(std::memory_order_relaxed);
}

} // namespace cpu

std::vector<std::string> available_isas()
{
    std::vector<std::string> names;
    for (cpu::KernelTable const* table : cpu::tables())
    {
        names.emplace_back(table->name);
    }
    return names;
}

std::string current_isa()
{
    return cpu::kernels().name;
}

void set_isa(std::string const& name)
{
    if (name == "auto")
    {
        cpu::chosen() = cpu::tables().back();
        return;
    }
    std::string choices;
    for (cpu::KernelTable const* table : cpu::tables())
    {
        if (name == table->name)
        {
            cpu::chosen() = table;
            return;
        }
        choices += std::string(table->name) + ", ";
    }
    throw std::invalid_argument(
        "instruction set '" + name + "' is not built in or not supported here: choose one of " + choices + "auto");
}

bool advise_huge_pages(void* data, size_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Only whole pages belong to the range: the neighbours of an unaligned buffer are not ours to advise.
    uintptr_t const page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    uintptr_t const begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    uintptr_t const end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
    static_cast<void>(data);
    static_cast<void>(bytes);
    return false;
#endif
}

double stream_sum(float const* data, size_t n, int n_threads)
{
    constexpr size_t kPiece = size_t{1} << 18;
    auto const n_pieces = static_cast<int64_t>((n + kPiece - 1) / kPiece);
    double total = 0.0;
    auto const sum = cpu::kernels().sum;
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : total)
    for (int64_t piece = 0; piece < n_pieces; ++piece)
    {
        size_t const begin = static_cast<size_t>(piece) * kPiece;
        total += sum(data + begin, n - begin < kPiece ? n - begin : kPiece);
    }
    return total;
}

} // namespace wmtp

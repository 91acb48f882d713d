#pragma once

// What the kernels need to know about the machine they run on.

#include <cstddef>
#include <string>
#include <vector>

namespace wmtp
{

//! Instruction sets built into this binary that this processor runs, slowest first.
std::vector<std::string> available_isas();

std::string current_isa();

//! Name of an available instruction set, or "auto" for the fastest.
void set_isa(std::string const& name);

//! Asks the kernel for huge pages under [data, data + bytes). False where that is not supported.
bool advise_huge_pages(void* data, size_t bytes);

//! Sum of `n` floats read once by `n_threads` threads: the machine's read bandwidth when timed.
double stream_sum(float const* data, size_t n, int n_threads);

} // namespace wmtp

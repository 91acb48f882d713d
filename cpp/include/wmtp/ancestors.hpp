#pragma once

// The ancestor mask of tree rows. Bit i of a query's words says that it descends from, or is, appended row i. Host and
// device alike.

#include <cstdint>

#include "wmtp/platform.hpp"

namespace wmtp
{

constexpr int32_t kAncestorWordBits = 32;

WMTP_HD bool is_ancestor(uint32_t const* words, int64_t row)
{
    return (words[row / kAncestorWordBits] >> (row % kAncestorWordBits) & 1U) != 0;
}

//! Ancestors among the first `n_rows` rows: a row's distance from the root, itself included.
WMTP_HD int32_t count_ancestors(uint32_t const* words, int64_t n_rows)
{
    int32_t count = 0;
    for (int64_t row = 0; row < n_rows; ++row)
    {
        count += is_ancestor(words, row) ? 1 : 0;
    }
    return count;
}

//! One past the last ancestor; 0 where there is none.
WMTP_HD int32_t ancestors_end(uint32_t const* words, int32_t n_words)
{
    for (int32_t word = n_words - 1; word >= 0; --word)
    {
        int32_t end = word * kAncestorWordBits;
        for (uint32_t bits = words[word]; bits != 0; bits >>= 1)
        {
            ++end;
        }
        if (end > word * kAncestorWordBits)
        {
            return end;
        }
    }
    return 0;
}

} // namespace wmtp

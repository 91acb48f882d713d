#pragma once

// Checks at the border. Each message names the value, the rule and the remedy.

#include <stdexcept>
#include <string>

#include "wmtp/attention.hpp"

namespace wmtp::cpu
{

template <class... Parts>
std::string message(Parts const&... parts)
{
    auto const text = [](auto const& part) -> std::string
    {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
        {
            return std::to_string(part);
        }
        else
        {
            return std::string(part);
        }
    };
    return (text(parts) + ...);
}

template <class... Parts>
void require(bool holds, Parts const&... parts)
{
    if (!holds)
    {
        throw std::invalid_argument(message(parts...));
    }
}

void check_heads(HeadShape heads);
void check_ragged(char const* name, RaggedRows rows);
void check_positions(char const* name, int64_t const* positions, int64_t n);
void check_scale(float scale);
void check_ring(RingCache const& ring, int32_t const* lanes, int32_t n_requests);
//! Pages of positions [0, end) of request b exist.
void check_pages(PagedCache const& pages, int32_t request, int64_t begin, int64_t end);

} // namespace wmtp::cpu

#pragma once

#include "wmtp/attention.hpp"

namespace wmtp::cpu
{

void check_append(AppendRows const& append, HeadShape heads);

//! ring_append after its checks.
void store_ring_rows(AppendRows const& append, HeadShape heads, RingCache const& ring, int32_t const* lanes);

} // namespace wmtp::cpu

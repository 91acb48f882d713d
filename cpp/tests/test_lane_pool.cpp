#include "check.hpp"
#include "wmtp/lane_pool.hpp"

namespace
{

template <class Call>
bool refuses(Call call)
{
    try
    {
        call();
    }
    catch (std::exception const&)
    {
        return true;
    }
    return false;
}

void lowest_lane_first_and_none_beyond_the_last()
{
    wmtp::LanePool pool(2);
    WMTP_CHECK(pool.acquire().lane == 0);
    WMTP_CHECK(pool.acquire().lane == 1);
    WMTP_CHECK(!pool.can_acquire());
    WMTP_CHECK(refuses([&] { pool.acquire(); }));
}

void a_stale_handle_is_refused()
{
    wmtp::LanePool pool(1);
    wmtp::LaneHandle const stale = pool.acquire();
    pool.extend(stale, 4);
    pool.release(stale);
    wmtp::LaneHandle const fresh = pool.acquire();
    WMTP_CHECK(fresh.lane == stale.lane);
    WMTP_CHECK(pool.length(fresh) == 0);
    WMTP_CHECK(refuses([&] { pool.length(stale); }));
    WMTP_CHECK(refuses([&] { pool.release(stale); }));
}

void rollback_only_shortens()
{
    wmtp::LanePool pool(1);
    wmtp::LaneHandle const lane = pool.acquire();
    pool.extend(lane, 9);
    pool.rollback(lane, 5);
    WMTP_CHECK(pool.length(lane) == 5);
    WMTP_CHECK(refuses([&] { pool.rollback(lane, 6); }));
    WMTP_CHECK(refuses([&] { pool.extend(lane, -1); }));
}

} // namespace

int main()
{
    lowest_lane_first_and_none_beyond_the_last();
    a_stale_handle_is_refused();
    rollback_only_shortens();
    return 0;
}

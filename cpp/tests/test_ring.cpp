#include <map>
#include <set>

#include "check.hpp"
#include "wmtp/ring.hpp"

namespace
{

void sinks_stay_and_the_rest_go_round()
{
    wmtp::RingMap const map{2, 6};
    int64_t const expected[] = {0, 1, 2, 3, 4, 5, 2, 3, 4, 5};
    for (int64_t position = 0; position < 10; ++position)
    {
        WMTP_CHECK(map.slot(position) == expected[position]);
    }
}

void plan_lists_what_the_definition_says()
{
    for (int64_t n_sink = 0; n_sink < 4; ++n_sink)
    {
        for (int64_t window = 1; window < 9; ++window)
        {
            wmtp::RingMap const map{n_sink, n_sink + window + 3};
            for (int64_t query = 0; query < 50; ++query)
            {
                std::set<int64_t> expected;
                for (int64_t p = 0; p <= query; ++p)
                {
                    if (p < n_sink || p > query - window)
                    {
                        expected.insert(p);
                    }
                }
                wmtp::VisiblePlan const plan = wmtp::visible_plan(map, window, query);
                std::set<int64_t> planned;
                for (int32_t s = 0; s < plan.n_segments; ++s)
                {
                    for (int64_t i = 0; i < plan.segments[s].count; ++i)
                    {
                        int64_t const position = plan.segments[s].first_position + i;
                        WMTP_CHECK(map.slot(position) == plan.segments[s].first_slot + i);
                        WMTP_CHECK(planned.insert(position).second);
                    }
                }
                WMTP_CHECK(planned == expected);
            }
        }
    }
}

void a_launch_writes_each_slot_once()
{
    wmtp::RingMap const map{2, 9};
    for (int64_t start = 0; start < 30; ++start)
    {
        for (int64_t n_rows = 0; n_rows < 40; ++n_rows)
        {
            wmtp::Survivors const kept = wmtp::survivors(map, start, n_rows);
            // Storing the rows one after another would leave the last writer of each slot: exactly these must be kept.
            std::map<int64_t, int64_t> last_writer;
            for (int64_t p = start; p < start + n_rows; ++p)
            {
                last_writer[map.slot(p)] = p;
            }
            std::map<int64_t, int64_t> stored;
            for (wmtp::PositionRange range : {kept.sink, kept.tail})
            {
                for (int64_t p = range.begin; p < range.end; ++p)
                {
                    WMTP_CHECK(stored.emplace(map.slot(p), p).second);
                }
            }
            WMTP_CHECK(stored == last_writer);
        }
    }
}

void newest_row_may_lead_the_query_by_the_spare()
{
    wmtp::RingMap const map{2, 2 + 5 + 3};
    WMTP_CHECK(wmtp::append_keeps_window(map, 5, 100, 103));
    WMTP_CHECK(!wmtp::append_keeps_window(map, 5, 100, 104));
}

} // namespace

int main()
{
    sinks_stay_and_the_rest_go_round();
    plan_lists_what_the_definition_says();
    a_launch_writes_each_slot_once();
    newest_row_may_lead_the_query_by_the_spare();
    return 0;
}

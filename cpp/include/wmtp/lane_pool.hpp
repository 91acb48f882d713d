#pragma once

// Who owns which lane, and how many positions of it are committed. Host only.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace wmtp
{

//! A lane and the generation in which it was handed out. A handle that outlives its release is refused.
struct LaneHandle
{
    int32_t lane;
    uint32_t generation;
};

//! Lanes are handed out lowest index first, so that a run is reproducible.
class LanePool
{
public:
    explicit LanePool(int32_t n_lanes)
    {
        if (n_lanes < 1)
        {
            throw std::invalid_argument(
                "n_lanes " + std::to_string(n_lanes) + " < 1: a pool serves at least one request; raise n_lanes");
        }
        states_.resize(static_cast<size_t>(n_lanes));
    }

    int32_t n_lanes() const
    {
        return static_cast<int32_t>(states_.size());
    }

    int32_t n_free() const
    {
        int32_t free_lanes = 0;
        for (State const& state : states_)
        {
            free_lanes += state.owned ? 0 : 1;
        }
        return free_lanes;
    }

    bool can_acquire() const
    {
        return n_free() > 0;
    }

    LaneHandle acquire()
    {
        for (size_t lane = 0; lane < states_.size(); ++lane)
        {
            State& state = states_[lane];
            if (!state.owned)
            {
                state.owned = true;
                state.length = 0;
                return LaneHandle{static_cast<int32_t>(lane), state.generation};
            }
        }
        throw std::runtime_error("all " + std::to_string(states_.size())
            + " lanes are owned: release one before acquiring, or raise n_lanes");
    }

    void release(LaneHandle handle)
    {
        State& state = checked(handle);
        state.owned = false;
        ++state.generation;
    }

    int64_t length(LaneHandle handle) const
    {
        return const_cast<LanePool*>(this)->checked(handle).length;
    }

    //! Commits `n_rows` more positions.
    void extend(LaneHandle handle, int64_t n_rows)
    {
        State& state = checked(handle);
        if (n_rows < 0)
        {
            throw std::invalid_argument(
                "extend by " + std::to_string(n_rows) + " rows: must be >= 0; use rollback to shorten a lane");
        }
        state.length += n_rows;
    }

    //! Forgets the positions at and after `length`. Nothing moves inside the ring.
    void rollback(LaneHandle handle, int64_t length)
    {
        State& state = checked(handle);
        if (length < 0 || length > state.length)
        {
            throw std::invalid_argument("rollback to length " + std::to_string(length) + " of a lane of length "
                + std::to_string(state.length) + ": must lie in [0, length]; use extend to lengthen a lane");
        }
        state.length = length;
    }

private:
    struct State
    {
        int64_t length = 0;
        uint32_t generation = 0;
        bool owned = false;
    };

    State& checked(LaneHandle handle)
    {
        if (handle.lane < 0 || static_cast<size_t>(handle.lane) >= states_.size())
        {
            throw std::invalid_argument("lane " + std::to_string(handle.lane) + " is not in [0, "
                + std::to_string(states_.size()) + "): use a handle that this pool's acquire returned");
        }
        State& state = states_[static_cast<size_t>(handle.lane)];
        if (!state.owned || state.generation != handle.generation)
        {
            throw std::invalid_argument("lane " + std::to_string(handle.lane) + " generation "
                + std::to_string(handle.generation) + " is stale: the lane was released; acquire a new handle");
        }
        return state;
    }

    std::vector<State> states_;
};

} // namespace wmtp

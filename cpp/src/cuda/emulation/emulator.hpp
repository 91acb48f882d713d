#pragma once

// Executes a kernel launch on the host: blocks one after the other, every thread of a block on a stack of its own.
// Threads run until they meet at a barrier, a shuffle or a tensor core step. The order in which they are resumed is
// drawn anew each time, so code that lacks a barrier gives wrong numbers here as it would there; shared memory starts
// as NaN in every block.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>

#include <cuda_runtime_api.h>

namespace wmtp::cuda::emulation
{

struct ThreadId
{
    int32_t thread;
    int32_t block[3];
};

//! The thread that is running.
ThreadId const& current();

void sync_block();
float shuffle_xor(float value, int32_t lane_mask);
float exp2(float x);

//! Copies `bytes` between aligned addresses; stops the program at an address a device would refuse.
void copy_aligned(void* to, void const* from, size_t bytes);

using UnpackHalf = float (*)(uint32_t bits);

//! The step in device.hpp's terms, for the whole warp at once.
void tensor_core_step(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2], UnpackHalf unpack);

//! Seed of the orders in which threads are resumed.
void set_seed(uint64_t seed);

//! Runs `body` as every thread of one block.
void run_block(int32_t const (&block)[3], int32_t n_threads, std::function<void()> const& body);

template <class Kernel>
cudaError_t launch(int64_t n_x, int64_t n_y, int64_t n_z, typename Kernel::Args const& args)
{
    using Shared = typename Kernel::Shared;
    auto const shared = std::make_unique<Shared>();
    for (int64_t z = 0; z < n_z; ++z)
    {
        for (int64_t y = 0; y < n_y; ++y)
        {
            for (int64_t x = 0; x < n_x; ++x)
            {
                std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(Shared));
                int32_t const block[3] = {static_cast<int32_t>(x), static_cast<int32_t>(y), static_cast<int32_t>(z)};
                run_block(block, Kernel::kThreads, [&] { Kernel::body(args, *shared); });
            }
        }
    }
    return cudaSuccess;
}

} // namespace wmtp::cuda::emulation

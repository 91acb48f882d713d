#include "emulator.hpp"

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

namespace wmtp::cuda::emulation
{
namespace
{

constexpr int32_t kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;

enum class Wait
{
    kNothing,
    kBlock,
    kWarp,
    kEnd
};

//! A thread of the block, with what it brought to the meeting of its warp.
struct Fiber
{
    ThreadId id;
    Wait wait;
    jmp_buf resume;
    std::unique_ptr<char[]> stack;
    float value;
    int32_t lane_mask;
    float* c;
    uint32_t const* a;
    uint32_t const* b;
    UnpackHalf unpack;
};

std::vector<Fiber> fibers;
Fiber* running = nullptr;
jmp_buf scheduler;
ucontext_t scheduler_context;
std::function<void()> const* block_body = nullptr;
uint64_t random_state = 1;

uint32_t draw(uint32_t n)
{
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>((random_state >> 33) % n);
}

[[noreturn]] void stop(char const* reason)
{
    std::fprintf(stderr, "emulated kernel, block (%d, %d, %d), thread %d: %s\n", running->id.block[0],
        running->id.block[1], running->id.block[2], running->id.thread, reason);
    std::abort();
}

void meet(Wait wait)
{
    running->wait = wait;
    if (_setjmp(running->resume) == 0)
    {
        _longjmp(scheduler, 1);
    }
}

void fiber_main()
{
    (*block_body)();
    running->wait = Wait::kEnd;
    _longjmp(scheduler, 1);
}

void start(Fiber& fiber)
{
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = &scheduler_context;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}

//! Runs a fiber until it waits or ends.
void run(Fiber& fiber, bool first)
{
    running = &fiber;
    if (_setjmp(scheduler) == 0)
    {
        if (first)
        {
            start(fiber);
        }
        _longjmp(fiber.resume, 1);
    }
}

float const* lane_c(Fiber const* warp, int32_t row, int32_t column)
{
    return warp[(row % 8) * 4 + column / 2].c + (row / 8) * 2 + column % 2;
}

float half_at(uint32_t word, int32_t index, UnpackHalf unpack)
{
    return unpack(index == 0 ? word & 0xFFFFU : word >> 16);
}

void step_warp(Fiber* warp)
{
    UnpackHalf const unpack = warp->unpack;
    float a[16][16];
    float b[16][8];
    for (int32_t lane = 0; lane < kWarp; ++lane)
    {
        int32_t const g = lane / 4;
        int32_t const t = lane % 4;
        for (int32_t i = 0; i < 2; ++i)
        {
            a[g][2 * t + i] = half_at(warp[lane].a[0], i, unpack);
            a[g + 8][2 * t + i] = half_at(warp[lane].a[1], i, unpack);
            a[g][2 * t + 8 + i] = half_at(warp[lane].a[2], i, unpack);
            a[g + 8][2 * t + 8 + i] = half_at(warp[lane].a[3], i, unpack);
            b[2 * t + i][g] = half_at(warp[lane].b[0], i, unpack);
            b[2 * t + 8 + i][g] = half_at(warp[lane].b[1], i, unpack);
        }
    }
    for (int32_t row = 0; row < 16; ++row)
    {
        for (int32_t column = 0; column < 8; ++column)
        {
            float sum = *lane_c(warp, row, column);
            for (int32_t k = 0; k < 16; ++k)
            {
                sum += a[row][k] * b[k][column];
            }
            *const_cast<float*>(lane_c(warp, row, column)) = sum;
        }
    }
}

void shuffle_warp(Fiber* warp)
{
    float values[kWarp];
    for (int32_t lane = 0; lane < kWarp; ++lane)
    {
        values[lane] = warp[lane].value;
    }
    for (int32_t lane = 0; lane < kWarp; ++lane)
    {
        warp[lane].value = values[lane ^ warp[lane].lane_mask];
    }
}

//! Lets the warp go on once all its threads are at the same meeting.
bool release_warp(Fiber* warp)
{
    for (int32_t lane = 0; lane < kWarp; ++lane)
    {
        if (warp[lane].wait != Wait::kWarp)
        {
            return false;
        }
    }
    for (int32_t lane = 1; lane < kWarp; ++lane)
    {
        if ((warp[lane].c == nullptr) != (warp->c == nullptr))
        {
            running = warp;
            stop("the threads of a warp wait at different operations");
        }
    }
    if (warp->c != nullptr)
    {
        step_warp(warp);
    }
    else
    {
        shuffle_warp(warp);
    }
    for (int32_t lane = 0; lane < kWarp; ++lane)
    {
        warp[lane].wait = Wait::kNothing;
    }
    return true;
}

bool release_block(int32_t n_threads)
{
    bool any = false;
    for (int32_t i = 0; i < n_threads; ++i)
    {
        if (fibers[static_cast<size_t>(i)].wait == Wait::kEnd)
        {
            continue;
        }
        if (fibers[static_cast<size_t>(i)].wait != Wait::kBlock)
        {
            return false;
        }
        any = true;
    }
    for (int32_t i = 0; any && i < n_threads; ++i)
    {
        Fiber& fiber = fibers[static_cast<size_t>(i)];
        if (fiber.wait == Wait::kEnd)
        {
            running = &fiber;
            stop("returned while others wait at a barrier");
        }
        fiber.wait = Wait::kNothing;
    }
    return any;
}

} // namespace

ThreadId const& current()
{
    return running->id;
}

void sync_block()
{
    meet(Wait::kBlock);
}

float shuffle_xor(float value, int32_t lane_mask)
{
    running->value = value;
    running->lane_mask = lane_mask;
    running->c = nullptr;
    meet(Wait::kWarp);
    return running->value;
}

float exp2(float x)
{
    return std::exp2(x);
}

void copy_aligned(void* to, void const* from, size_t bytes)
{
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0)
    {
        stop("misaligned access");
    }
    std::memcpy(to, from, bytes);
}

void tensor_core_step(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2], UnpackHalf unpack)
{
    running->c = c;
    running->a = a;
    running->b = b;
    running->unpack = unpack;
    meet(Wait::kWarp);
}

void set_seed(uint64_t seed)
{
    random_state = seed * 2 + 1;
}

void run_block(int32_t const (&block)[3], int32_t n_threads, std::function<void()> const& body)
{
    while (fibers.size() < static_cast<size_t>(n_threads))
    {
        fibers.emplace_back();
        fibers.back().stack = std::make_unique<char[]>(kStackBytes);
    }
    block_body = &body;
    for (int32_t i = 0; i < n_threads; ++i)
    {
        Fiber& fiber = fibers[static_cast<size_t>(i)];
        fiber.id = ThreadId{i, {block[0], block[1], block[2]}};
        fiber.wait = Wait::kNothing;
    }
    std::vector<bool> started(static_cast<size_t>(n_threads), false);
    int32_t const n_warps = n_threads / kWarp;
    for (;;)
    {
        bool progress = false;
        auto const first_warp = static_cast<int32_t>(draw(static_cast<uint32_t>(n_warps)));
        for (int32_t w = 0; w < n_warps; ++w)
        {
            Fiber* const warp = fibers.data() + (first_warp + w) % n_warps * kWarp;
            auto const first_lane = static_cast<int32_t>(draw(kWarp));
            // A warp runs as far as it can before the next: warps drift apart up to the barriers that hold them.
            do
            {
                for (int32_t i = 0; i < kWarp; ++i)
                {
                    Fiber& fiber = warp[(first_lane + i) % kWarp];
                    if (fiber.wait == Wait::kNothing)
                    {
                        bool const first = !started[static_cast<size_t>(fiber.id.thread)];
                        started[static_cast<size_t>(fiber.id.thread)] = true;
                        run(fiber, first);
                        progress = true;
                    }
                }
            } while (release_warp(warp));
        }
        progress = release_block(n_threads) || progress;
        if (!progress)
        {
            break;
        }
    }
    for (int32_t i = 0; i < n_threads; ++i)
    {
        if (fibers[static_cast<size_t>(i)].wait != Wait::kEnd)
        {
            running = &fibers[static_cast<size_t>(i)];
            stop("waits for threads that never come");
        }
    }
}

} // namespace wmtp::cuda::emulation

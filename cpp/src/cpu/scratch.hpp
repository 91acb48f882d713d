#pragma once

// Memory that a thread keeps between calls, so that a step allocates only while it grows.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace wmtp::cpu
{

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

class Scratch
{
public:
    Scratch() = default;
    Scratch(Scratch const&) = delete;
    Scratch& operator=(Scratch const&) = delete;

    ~Scratch()
    {
        std::free(data_);
    }

    //! At least `bytes` bytes, aligned to a cache line, with unspecified contents; valid until the next reserve.
    char* reserve(size_t bytes)
    {
        if (bytes > size_)
        {
            std::free(data_);
            size_ = 0;
            size_t const rounded = round_up(bytes, size_t{1} << 16);
            data_ = static_cast<char*>(std::aligned_alloc(kCacheLine, rounded));
            if (data_ == nullptr)
            {
                throw std::bad_alloc();
            }
            size_ = rounded;
        }
        return data_;
    }

private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

//! Hands out consecutive arrays of one block: first to count the bytes (base null), then to place them.
class Arena
{
public:
    explicit Arena(char* base = nullptr)
        : base_(base)
    {
    }

    template <class T>
    T* take(size_t n)
    {
        T* const at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += round_up(n * sizeof(T), kCacheLine);
        return at;
    }

    size_t used() const
    {
        return used_;
    }

private:
    char* base_;
    size_t used_ = 0;
};

} // namespace wmtp::cpu

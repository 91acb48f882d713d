// Prefetching of the next block. Included inside an anonymous namespace, before simd_*.inl.

//! Walks over the cache lines of token rows and asks for them one by one, between arithmetic, into the second-level
//! cache: a burst would fill the miss buffers and stall, and the first-level cache is full of this block. Whole token
//! rows in address order, because that is what the hardware prefetcher recognises and runs ahead of.
class LineWalk
{
public:
    LineWalk(void const* const* rows, BlockTask const& task)
        : row_(rows)
        , end_(rows + task.n_next_rows)
        , offset_(task.next_offset_bytes)
        , row_bytes_(task.next_row_bytes)
        , line_(nullptr)
        , line_end_(nullptr)
    {
    }

    void touch()
    {
        if (line_ >= line_end_)
        {
            if (row_ == end_)
            {
                return;
            }
            line_ = static_cast<char const*>(*row_++) + offset_;
            line_end_ = line_ + row_bytes_;
        }
        __builtin_prefetch(line_, 0, 2);
        line_ += 64;
    }

private:
    void const* const* row_;
    void const* const* end_;
    size_t offset_;
    int row_bytes_;
    char const* line_;
    char const* line_end_;
};

#pragma once

// Stores appended rows. A thread has 16 elements of K or V: two 16-byte loads, and one or two 16-byte stores.

#include "arguments.hpp"
#include "device.hpp"

namespace wmtp::cuda
{

struct AppendRowsKernel
{
    using Args = AppendArgs;
    static constexpr int kThreads = 128;
    static constexpr int kMinBlocks = 8;
    static constexpr int kElements = 16; //!< per thread

    struct Shared
    {
        char nothing;
    };

    //! The request that owns a row; n_requests when none does.
    static WMTP_DEVICE int32_t owner(AppendArgs const& args, int32_t row)
    {
        if (row >= args.row_offsets[args.n_requests])
        {
            return args.n_requests;
        }
        int32_t low = 0; // row_offsets[low] <= row < row_offsets[high]
        int32_t high = args.n_requests;
        while (high - low > 1)
        {
            int32_t const middle = (low + high) / 2;
            if (args.row_offsets[middle] <= row)
            {
                low = middle;
            }
            else
            {
                high = middle;
            }
        }
        return low;
    }

    //! Where a row is stored, or -1 where another row of this launch takes its slot.
    static WMTP_DEVICE int64_t cell_of_row(AppendArgs const& args, int32_t request, int32_t row)
    {
        int64_t const start = args.start_positions[request];
        int64_t const position = start + row - args.row_offsets[request];
        if (args.lanes == nullptr)
        {
            int64_t const page = position / args.page_size;
            return args.block_table[request * args.max_pages + page] * args.page_size + position % args.page_size;
        }
        RingMap const map{args.n_sink, args.capacity};
        Survivors const kept = survivors(map, start, args.row_offsets[request + 1] - args.row_offsets[request]);
        if (position >= kept.sink.end && position < kept.tail.begin)
        {
            return -1;
        }
        return args.lanes[request] * args.capacity + map.slot(position);
    }

    static WMTP_DEVICE float element(Words4 const (&words)[4], DType type, int i)
    {
        if (type == DType::kFloat32)
        {
            return float_of(words[i / 4].w[i % 4]);
        }
        uint32_t const bits = words[i / 8].w[i % 8 / 2] >> (i % 2 * 16) & 0xFFFFU;
        return type == DType::kBFloat16 ? float_from_bf16(bits) : float_from_fp16(bits);
    }

    static WMTP_DEVICE void convert(
        AppendArgs const& args, Words4 const (&in)[4], float inverse_scale, Words4 (&out)[4])
    {
        WMTP_UNROLL
        for (int i = 0; i < kElements; ++i)
        {
            float const value = element(in, args.row_dtype, i) * inverse_scale;
            if (args.kv_dtype == DType::kFloat32)
            {
                out[i / 4].w[i % 4] = bits_of(value);
            }
            else if (args.kv_dtype == DType::kFloat8E4M3)
            {
                out[0].w[i / 4] |= e4m3_from_float(value) << (i % 4 * 8);
            }
            else
            {
                uint32_t const bits =
                    args.kv_dtype == DType::kBFloat16 ? bf16_from_float(value) : fp16_from_float(value);
                out[i / 8].w[i % 8 / 2] |= bits << (i % 2 * 16);
            }
        }
    }

    static WMTP_DEVICE void body(AppendArgs const& args, Shared&)
    {
        int32_t const units = args.row_elements / kElements; // of one row of K
        int64_t const index = static_cast<int64_t>(block_x()) * kThreads + thread_index();
        auto const row = static_cast<int32_t>(index / (2 * units));
        if (row >= args.n_rows)
        {
            return;
        }
        auto const unit = static_cast<int32_t>(index % (2 * units));
        int32_t const request = owner(args, row);
        if (request == args.n_requests)
        {
            return;
        }
        int64_t const cell = cell_of_row(args, request, row);
        if (cell < 0)
        {
            return;
        }
        bool const is_key = unit < units;
        int64_t const inside = static_cast<int64_t>(is_key ? unit : unit - units) * kElements;
        char const* const source = static_cast<char const*>(is_key ? args.k : args.v)
            + (static_cast<int64_t>(row) * args.row_elements + inside) * bytes_per_element(args.row_dtype);
        char* const target = static_cast<char*>(is_key ? args.k_cache : args.v_cache)
            + (cell * args.row_elements + inside) * bytes_per_element(args.kv_dtype);
        int32_t const source_words = kElements * bytes_per_element(args.row_dtype) / 16;
        int32_t const target_words = kElements * bytes_per_element(args.kv_dtype) / 16;
        Words4 in[4] = {};
        WMTP_UNROLL
        for (int i = 0; i < 4; ++i)
        {
            if (i < source_words)
            {
                in[i] = load_16_bytes(source + i * 16);
            }
        }
        Words4 out[4] = {};
        if (args.row_dtype == args.kv_dtype)
        {
            WMTP_UNROLL
            for (int i = 0; i < 4; ++i)
            {
                out[i] = in[i];
            }
        }
        else
        {
            convert(args, in, is_key ? args.k_inverse_scale : args.v_inverse_scale, out);
        }
        WMTP_UNROLL
        for (int i = 0; i < 4; ++i)
        {
            if (i < target_words)
            {
                store_16_bytes(target + i * 16, out[i]);
            }
        }
    }
};

} // namespace wmtp::cuda

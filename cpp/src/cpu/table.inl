// The functions of one instruction set, gathered. Included inside an anonymous namespace.

#define WMTP_KERNEL_TABLE(name, has_dot, dot)                                                                          \
    KernelTable                                                                                                        \
    {                                                                                                                  \
        name, has_dot, attend_f32, attend_bf16, dot, merge_row, finish_row_f32, finish_row_bf16, gated_delta_rows,     \
            gated_delta_commit, sum                                                                                    \
    }

#pragma once

// The few names of the CUDA runtime that the launchers' interface mentions, for builds on the emulator, where "device"
// memory is host memory and a stream is executed at once.

enum cudaError_t
{
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1
};

using cudaStream_t = struct CUstream_st*;

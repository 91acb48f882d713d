"""Quantized weights: reading what others wrote, and writing NVFP4."""

from tllm_wmtp.checkpoint.quantization.metadata import Quantization, read_quantization
from tllm_wmtp.checkpoint.quantization.weights import Fp8Weight, NvFp4Weight

__all__ = ["Fp8Weight", "NvFp4Weight", "Quantization", "read_quantization"]

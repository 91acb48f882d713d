"""The paper's figures that the report sets beside its own.

Source: arXiv 2607.21535, "Windowed-MTP", its text and the authors' public reproduction package.
Models: Qwen3.6-35B-A3B (q35), Qwen3.5-122B-A10B (q122), Nemotron-3-Super-120B-A12B (nem); one B200
GPU, NVFP4 weights, bf16 KV unless said, batch 1, depth 7, window 4032, sink 64, 1,040,000 tokens,
input niah_multiquery_enum, unless said.
"""

from __future__ import annotations

SOURCE = "arXiv 2607.21535"
SETTING = "other models, one B200 GPU"
LINK = "https://arxiv.org/abs/2607.21535"

NAMES = {"q35": "Qwen3.6-35B", "q122": "Qwen3.5-122B", "nem": "Nemotron-3-Super-120B"}

#: The contexts of its sweep, in tokens.
SWEEP = (261_000, 1_040_000)
#: Step time native over windowed, at both ends of the sweep.
STEP_RATIO = {"q35": (1.27, 1.43), "q122": (1.24, 1.30), "nem": (1.17, 1.26)}
#: Step in ms, native and windowed.
STEP_MS = {"q35": (26.7, 18.4), "q122": (33.9, 25.9), "nem": (32.8, 25.8)}
#: AL of q35 by window; its native AL.
DOSE = {1024: 3.79, 2048: 4.74, 4032: 4.74}
DOSE_NATIVE = 4.49
#: AL, native and windowed; nem's windowed one is 3.59 to 3.61.
AL = {"q35": (4.49, 4.74), "q122": (5.57, 4.74), "nem": (3.75, 3.59)}
#: End to end over native, at each arm's own best of the depths 3, 5, 7 and 9.
BEST_DEPTH_GAIN = (1.22, 1.58)
#: End to end over native on q35, and the task's AL.
TASK_GAIN = {"niah_multivalue": (1.04, 5.9), "vt": (1.17, 4.2), "cwe": (1.38, 2.8)}
#: Full-attention layers, and the draft's share of all keys and values, 1 / (F + 1).
DRAFT_SHARE = {"q35": (10, 0.091), "q122": (12, 0.077), "nem": (8, 0.111)}
#: Step ratio at 1M with bf16 and with fp8 KV.
KV_STEP_RATIO = {"q35": (1.46, 1.22), "q122": (1.29, 1.15), "nem": (1.26, 1.26)}
#: ms per draft forward of q35, native and windowed.
FORWARD_MS = (1.19, 0.71)
#: Least R squared of its fits of the step against gamma.
FIT_R_SQUARED = 0.97
#: Draft proposals that the window leaves unchanged.
AGREEMENT = (0.86, 0.94)
#: Softmax mass in sinks and window: the Qwen heads, and Nemotron's without rotary positions.
MASS_QWEN = (0.75, 0.80)
MASS_NEMOTRON = 0.16
#: Native logit margin where the window changes the proposal, and on average (q35 and nem).
MARGIN_AT_FLIPS = 0.5
MARGIN_MEAN = (3.0, 5.0)

"""Why a window is enough: reads of the draft head's own keys, compared at the same hidden state.

A trajectory of the target (:mod:`.trajectory`) gives hidden states and the head's keys and values.
The head is then run again and again at every position of it, over the same keys, with another read
(:mod:`.reads`) each time; :mod:`.attend` owns the keys and :mod:`.run` counts what changed.
"""

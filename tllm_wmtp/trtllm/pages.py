"""The window without a kernel of ours: the stock attention over the first and the last pages.

For the time of one draft forward, each generation request's block table is replaced by its sink
pages followed by its last pages, and its length is shortened by what lies between. Keys are rotated
when they are cached, so they do not mind. The pool still holds the whole context: this saves reads,
not memory, and it leaves the first draft forward of a prompt as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from tllm_wmtp.errors import ConfigError


def page_counts(n_sink: int, window: int, page: int) -> tuple[int, int]:
    """Sink pages and window pages that show at least ``n_sink`` and ``window`` tokens.

    The last page may hold a single token, hence one page more than the window's own.
    """
    return -(-n_sink // page), -(-(window - 1) // page) + 1


class PageWindow:
    """Shows one forward the first and last pages only, and puts everything back.

    Works on ``kv_cache_block_offsets [pools, requests, 2, pages]`` and ``kv_lens_cuda [requests]``
    of the attention metadata, in place: graphs and the attention op hold their addresses.
    """

    def __init__(self, n_sink: int, window: int, page: int):
        self.page = page
        self.n_sink_pages, self.n_window_pages = page_counts(n_sink, window, page)
        self._saved: tuple[Any, int, torch.Tensor, torch.Tensor] | None = None

    @property
    def n_pages(self) -> int:
        return self.n_sink_pages + self.n_window_pages

    def apply(self, metadata: Any, n_requests: int) -> None:
        """
        Raises:
            ConfigError: the metadata has no block table or lengths on the device.
        """
        table = getattr(metadata, "kv_cache_block_offsets", None)
        lengths = getattr(metadata, "kv_lens_cuda", None)
        if table is None or lengths is None:
            raise ConfigError(
                f"attention metadata {type(metadata).__name__}",
                "mode 'pages' rewrites kv_cache_block_offsets and kv_lens_cuda, which it lacks",
                "use the TRTLLM attention backend, or mode 'ring'",
            )
        shown = min(self.n_pages, table.shape[-1])
        table, lengths = table[:, :n_requests, :, :shown], lengths[:n_requests]
        whole = metadata.kv_cache_block_offsets[:, :n_requests]
        used = (lengths + (self.page - 1)) // self.page
        hidden = (used - self.n_pages).clamp_(min=0)
        columns = torch.arange(shown, device=table.device)
        column = columns + (columns >= self.n_sink_pages) * hidden[:, None]
        index = column.long()[None, :, None].expand(*table.shape[:3], shown)
        self._saved = metadata, n_requests, table.clone(), lengths.clone()
        table.copy_(whole.gather(-1, index))
        lengths.sub_(hidden * self.page)

    def restore(self) -> None:
        """Undoes the last :meth:`apply`; nothing to do if there was none."""
        if self._saved is None:
            return
        metadata, n_requests, table, lengths = self._saved
        self._saved = None
        shown = table.shape[-1]
        metadata.kv_cache_block_offsets[:, :n_requests, :, :shown].copy_(table)
        metadata.kv_lens_cuda[:n_requests].copy_(lengths)

"""What the host decides of a draft batch: how many rows each request gets. NumPy, as vLLM's arrays on the host are."""

from dataclasses import dataclass

import numpy as np

from peagle_kernels.geometry import num_appended


@dataclass(frozen=True)
class DraftBatch:
    """The numbers of one draft batch.

    Ragged (``static_length`` 0): ``DraftBuffers.query_start_loc`` holds the starts, staging row i is target row i,
    and a request has as many samples as the step drafts.

    Static: every request gets ``static_length`` rows; staging is compact, ``staging_length`` rows a request, the most
    that one has verified; and a request has room for ``static_length - staging_length + 1`` samples, of which a step
    that drafts fewer leaves the last ones inert. So one shape, and one CUDA graph, serves every smaller K, too.
    """

    num_reqs: int
    num_target_rows: int
    num_speculative_tokens: int  # K of this step, 0 included
    num_rows: int  # draft rows to fill, those of padding requests and beyond included
    num_reqs_padded: int  # requests to fill; from num_reqs on they are padding
    static_length: int = 0
    staging_length: int = 0

    @property
    def num_staging_rows(self) -> int:
        """Rows of the target's hidden states that staging holds."""
        return self.num_reqs_padded * self.staging_length if self.static_length else self.num_target_rows

    @property
    def samples_per_req(self) -> int:
        """Samples that a request has room for."""
        return self.static_length - self.staging_length + 1 if self.static_length else self.num_speculative_tokens


def ragged_lengths(num_query: np.ndarray, num_speculative_tokens: int, max_model_len: int) -> np.ndarray:
    """[num_reqs] L of the ragged layout.

    Args:
        num_query: [num_reqs] verified rows of each request; an upper bound will do.
    """
    return np.minimum(num_query + (num_appended(num_speculative_tokens) - 1), max_model_len)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """[num_reqs + 1] int32 draft row at which each request begins."""
    return np.append(0, lengths).cumsum(dtype=np.int32)


def seq_lens_bound(
    target_seq_lens: np.ndarray, lengths: np.ndarray, num_speculative_tokens: int, max_model_len: int
) -> np.ndarray:
    """[num_reqs] int32 upper bound of ``geometry.Window.seq_len``, for a host that does not know what was refused.

    Args:
        target_seq_lens: [num_reqs] upper bound of the target's sequence lengths.
        lengths: [num_reqs] L of each request.
    """
    window_end = np.minimum(target_seq_lens + (num_appended(num_speculative_tokens) - 1), max_model_len)
    return np.maximum(window_end, lengths).astype(np.int32)

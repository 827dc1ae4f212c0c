"""What every neural drafter has in common: embedding and output head, its own or the target's, and the kept tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspec_lab.drafters.layers import Linear, linear
from dspec_lab.models.family import ModelSpec

WeightSource = Callable[[], Tensor]  # looks a shared weight up, so that a replaced one is never stale


class DraftModel(nn.Module):
    """Base of the drafters' models: token ids to embeddings, hidden states to draft logits and back to target ids.

    Embedding and head are either parameters of this module or the target's own tensors, looked up at each use
    (`share`). A reduced draft vocabulary has W kept tokens; kept token i is target token i + d2t[i].
    """

    d2t: Tensor | None  # offsets [W], int64
    target_ids_W: Tensor | None
    draft_index_V: Tensor | None  # -1 where a target token is not kept

    def __init__(
        self, spec: ModelSpec, draft_vocab_size: int | None, *, own_embedding: bool = False, own_head: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.draft_vocab_size = draft_vocab_size or spec.vocab_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if own_embedding else None
        self.lm_head = Linear(spec.hidden_size, self.draft_vocab_size, bias=False) if own_head else None
        offsets_W = None if draft_vocab_size is None else torch.zeros(draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", offsets_W)
        self.register_buffer("target_ids_W", None, persistent=False)
        self.register_buffer("draft_index_V", None, persistent=False)
        if offsets_W is not None and not offsets_W.is_meta:
            self.keep_tokens(torch.arange(offsets_W.shape[0]))
        self._shared_embedding: WeightSource | None = None
        self._shared_head: WeightSource | None = None
        self._kept_head: tuple[tuple[int, int], Tensor] | None = None

    def keep_tokens(self, target_ids_W: Int[Tensor, " W"]) -> None:
        """Set the reduced vocabulary: kept token i stands for target token `target_ids_W[i]`."""
        if self.d2t is None:
            raise ValueError("this drafter was built for the whole vocabulary (draft_vocab_size is None)")
        if target_ids_W.shape != self.d2t.shape:
            raise ValueError(f"{target_ids_W.shape[0]} kept tokens for a draft vocabulary of {self.draft_vocab_size}")
        if int(target_ids_W.min()) < 0 or int(target_ids_W.max()) >= self.vocab_size:
            raise ValueError(
                f"kept tokens {int(target_ids_W.min())}..{int(target_ids_W.max())} leave the vocabulary of "
                f"{self.vocab_size}"
            )
        if target_ids_W.unique().shape[0] != target_ids_W.shape[0]:
            raise ValueError("a target token is kept twice in the draft vocabulary")
        ids_W = target_ids_W.to(device=self.d2t.device, dtype=torch.int64)
        index_W = torch.arange(ids_W.shape[0], device=ids_W.device)
        self.d2t = ids_W - index_W
        self.target_ids_W = ids_W.clone()
        self.draft_index_V = torch.full((self.vocab_size,), -1, device=ids_W.device).scatter_(0, ids_W, index_W)
        self._kept_head = None

    def share(self, *, embedding: WeightSource | None = None, head: WeightSource | None = None) -> None:
        """Use the target's embedding table or output head where this checkpoint has none of its own."""
        for name, source, own in (("embedding", embedding, self.embed_tokens), ("head", head, self.lm_head)):
            if source is None or own is not None:
                continue
            shape = tuple(source().shape)
            if shape != (self.vocab_size, self.spec.hidden_size):
                raise ValueError(
                    f"the target's {name} has shape {shape}, the drafter needs "
                    f"{(self.vocab_size, self.spec.hidden_size)}"
                )
        self._shared_embedding, self._shared_head = embedding, head

    def shared_weights(self) -> dict[str, Tensor]:
        """The borrowed tensors this model uses, by their public names; a reduced head has the kept rows only."""
        weights = {}
        if self.embed_tokens is None and self._shared_embedding is not None:
            weights["embed_tokens.weight"] = self._shared_embedding()
        if self.lm_head is None and self._shared_head is not None:
            weights["lm_head.weight"] = self._draft_head()
        return weights

    def embed(self, token_ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        """Input embeddings of target token ids, scaled as the family asks, in the dtype of hidden states."""
        table_VD = self._weight("embedding", self.embed_tokens, self._shared_embedding)
        embedded = F.embedding(token_ids, table_VD)
        if self.spec.embedding_scale != 1.0:
            embedded = embedded * torch.tensor(self.spec.embedding_scale, dtype=table_VD.dtype)
        return embedded.to(self.activation_dtype)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of hidden states: that of the norms, whatever the matrices are stored in."""
        return self.norm.weight.dtype

    def cast_matrices(self, dtype: torch.dtype) -> None:
        """Store matrices in `dtype`; norms, biases and the confidence head stay as they are."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and not name.startswith("confidence_head."):
                parameter.data = parameter.data.to(dtype)
        self._kept_head = None

    def head_logits(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N W"]:
        """Logits over the draft vocabulary of normed hidden states, soft cap included."""
        return self._logits(hidden, self._draft_head())

    def teacher_logits(self, last_hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """The target's logits over its whole vocabulary, from its hidden states after the final norm."""
        if self.lm_head is not None and self.d2t is None:
            return self._logits(last_hidden, self.lm_head.weight)
        if self._shared_head is None:
            raise ValueError("the teacher's law needs the target's whole output head; share it first")
        return self._logits(last_hidden, self._shared_head())

    def draft_head(self) -> Float[Tensor, "W D"]:
        """Output head over the draft vocabulary, its own or the kept rows of the target's."""
        return self._draft_head()

    def to_target_ids(self, draft_ids: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        """Target token ids of indices into the draft vocabulary."""
        return draft_ids if self.target_ids_W is None else self.target_ids_W[draft_ids]

    def to_draft_ids(self, token_ids: Int[Tensor, "*N"]) -> Int[Tensor, "*N"]:
        """Indices into the draft vocabulary of target token ids; -1 for a token that is not kept."""
        return token_ids if self.draft_index_V is None else self.draft_index_V[token_ids]

    def spread(self, probs_NW: Float[Tensor, "N W"]) -> Float[Tensor, "N V"]:
        """Draft probabilities over the target's vocabulary: 0 for tokens that are not kept."""
        if self.target_ids_W is None:
            return probs_NW
        probs_NV = probs_NW.new_zeros(probs_NW.shape[0], self.vocab_size)
        # half the time of an indexed assignment
        return probs_NV.scatter_(1, self.target_ids_W.expand(probs_NW.shape[0], -1), probs_NW)

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        logits = linear(hidden, head)
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _draft_head(self) -> Tensor:
        head_VD = self._weight("head", self.lm_head, self._shared_head)
        if self.target_ids_W is None or self.lm_head is not None:
            return head_VD
        # the kept rows are gathered again whenever the target's head was replaced or written to
        version = 0 if head_VD.is_inference() else head_VD._version
        key = (head_VD.data_ptr(), version)
        if self._kept_head is None or self._kept_head[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._kept_head = (key, head_VD.detach().index_select(0, self.target_ids_W))
        return self._kept_head[1]

    @staticmethod
    def _weight(name: str, own: nn.Module | None, shared: WeightSource | None) -> Tensor:
        if own is not None:
            return own.weight
        if shared is None:
            raise ValueError(f"this drafter has no {name} of its own; share the target's first")
        return shared()

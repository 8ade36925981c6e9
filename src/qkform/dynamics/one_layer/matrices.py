"""The full model: d x d matrices, every sequence of the task once, loss and gradients over all of them.

Embeddings are orthonormal rows E, label directions orthonormal rows U. The set is symmetric: each class with each
cyclic window of `relevant` of its tokens, each cyclic window of `distractors` common tokens, each query of the class.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from qkform.dynamics.one_layer.points import Array
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.task import Task

_LARGEST = 2**24  # entries of (sequences x keys) that a simulation holds


class Matrices:
    """The task as arrays. `one_hot` embeddings: the basis in which optimizers that work by entry see tokens."""

    def __init__(self, task: Task, objective: str, *, seed: int = 0, one_hot: bool = False) -> None:
        if task.common == math.inf:
            raise DynamicsError("a simulation needs every token: common=inf has closed forms alone")
        self.task, self.objective = task, objective
        n_keys = task.class_tokens + int(task.common)
        queries = 1 if task.queries_per_class is None else task.queries_per_class
        n_sequences = task.class_tokens * int(task.common) * queries
        if n_sequences * n_keys > _LARGEST:
            raise DynamicsError(
                f"a simulation lists every sequence, and this task has {n_sequences:,} over {n_keys:,} tokens; "
                "make it smaller, or use the closed form alone"
            )
        self.counts, self.labels, self.query = _sequences(task)  # (S, K), (S,), (S,)
        self.open = np.log(self.counts, where=self.counts > 0, out=np.full(self.counts.shape, -np.inf))
        self.asked = np.eye(task.query_tokens)[self.query]  # (S, query tokens)
        self.targets = np.eye(task.classes)[self.labels] - (0 if objective == "ce" else 1 / task.classes)
        self.d = int(task.vocabulary)
        rng = np.random.default_rng(seed)
        tokens, outputs = (
            np.eye(self.d) if one_hot else np.linalg.qr(rng.normal(size=(self.d, self.d)))[0]
            for _ in range(2)
        )
        self.keys, self.queries = tokens[:n_keys], tokens[n_keys:]  # (K, d), (query tokens, d)
        self.outputs = outputs[: task.classes]  # (M, d)
        self.ray_qk, self.ray_ov = self._rays()

    def _rays(self) -> tuple[Array, Array]:
        """D_QK and D_OV, (d, d): the directions of unit gap and unit gain."""
        task = self.task
        owner = np.repeat(np.arange(task.classes), task.per_class)  # class of every class token
        asker = np.repeat(np.arange(task.classes), task.query_tokens // task.classes or 1)[
            : task.query_tokens
        ]
        own = np.ones((task.query_tokens, task.class_tokens))
        if task.queries_per_class is not None:
            own = (asker[:, None] == owner).astype(float)
        mine = own.sum(1, keepdims=True)  # class tokens that this query meets
        common = np.ones((task.query_tokens, int(task.common)))
        scores = np.hstack([own * task.common, -mine * common]) / (mine + task.common)
        logits = np.zeros((task.classes, len(self.keys)))
        logits[:, : task.class_tokens] = (owner == np.arange(task.classes)[:, None]) - 1 / task.classes
        return self.queries.T @ scores @ self.keys, self.outputs.T @ logits @ self.keys

    def attend(self, w_qk: Array) -> Array:
        """(S, K) attention of every sequence on every token, several places of one token summed."""
        scores = self.task.score_scale * (self.queries @ w_qk @ self.keys.T)  # (query tokens, K)
        logits = self.open + scores[self.query]
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def loss(self, w_qk: Array, w_ov: Array) -> float:
        return self._loss(self.attend(w_qk) @ (self.outputs @ w_ov @ self.keys.T).T)[0]

    def gradients(self, w_qk: Array, w_ov: Array) -> tuple[float, Array, Array]:
        """The loss, dL/dW_QK and dL/dW_OV, means over all sequences."""
        weights = self.attend(w_qk)  # (S, K)
        said = self.outputs @ w_ov @ self.keys.T  # (M, K), the logits that a token gives
        loss, error = self._loss(weights @ said.T)
        back = error @ said  # (S, K)
        pull = weights * (back - (weights * back).sum(1, keepdims=True))
        g_qk = self.task.score_scale * (self.queries.T @ (self.asked.T @ pull) @ self.keys)
        return loss, g_qk, self.outputs.T @ (error.T @ weights) @ self.keys

    def _loss(self, logits: Array) -> tuple[float, Array]:
        """The mean loss, and its gradient with respect to the logits, (S, M)."""
        n = len(self.labels)
        if self.objective == "squared":
            error = logits - self.targets
            return 0.5 * float((error**2).sum()) / n, error / n
        top = logits.max(1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(1, keepdims=True)
        # -log p as log(1 + the others' share): small losses keep their digits
        right = logits[np.arange(n), self.labels]
        others = np.exp(logits - right[:, None])
        others[np.arange(n), self.labels] = 0.0
        return float(np.log1p(others.sum(1)).mean()), (weights / total - self.targets) / n

    def gap(self, w_qk: Array) -> float:
        """The part of W_QK along its ray, as a gap of scores."""
        return self.task.score_scale * float((w_qk * self.ray_qk).sum() / (self.ray_qk**2).sum())

    def gain(self, w_ov: Array) -> float:
        return float((w_ov * self.ray_ov).sum() / (self.ray_ov**2).sum())

    def attention(self, w_qk: Array) -> tuple[Array, Array]:
        """Per sequence, the attention on its relevant tokens and the entropy over its keys in nats; both (S,)."""
        weights = self.attend(w_qk)
        each = np.where(self.counts > 0, weights / np.maximum(self.counts, 1), 1.0)  # of one key
        entropy = -(weights * np.log(np.maximum(each, 1e-300))).sum(1)
        return weights[:, : self.task.class_tokens].sum(1), entropy


def off_ray(matrix: Array, on_ray: Array) -> float:
    """The share of ‖matrix‖ that is not its part on the ray."""
    return float(np.linalg.norm(matrix - on_ray) / (np.linalg.norm(matrix) or 1.0))


def _sequences(task: Task) -> tuple[Array, Array, Array]:
    """How often each key token is in each sequence, the sequence's label, and which query token closes it."""
    common = int(task.common)
    own, shared = _windows(task.per_class, task.relevant), _windows(common, task.distractors)
    queries = 1 if task.queries_per_class is None else task.queries_per_class
    rows, labels, asked = [], [], []
    for label in range(task.classes):
        for query in range(queries):
            for window in own:
                block = np.zeros((common, task.class_tokens + common))
                block[:, label * task.per_class : (label + 1) * task.per_class] = window
                block[:, task.class_tokens :] = shared
                rows.append(block)
                labels += [label] * common
                asked += [0 if task.queries_per_class is None else label * queries + query] * common
    return np.concatenate(rows), np.array(labels), np.array(asked)


def _windows(size: int, length: int) -> Array:
    """(size, size): row i counts the tokens i, i+1, ..., i+length-1, going round."""
    whole, rest = divmod(length, size)
    start = np.zeros(size)
    start[:rest] = 1
    return whole + np.stack([np.roll(start, i) for i in range(size)])

"""Every error that qkform raises on purpose.

::

    QKFormError                    catch this one to catch them all
    ├── SourceError                the thing that was named cannot be opened as a checkpoint
    │   └── CheckpointError        it was opened, and its bytes are not what its format promises
    ├── ConfigError        *       an option that cannot be, or a config that is missing or contradicts the weights
    ├── LayoutError                which tensors are Q and K, or how they are stored, is not known
    ├── FormError          *       arrays that do not make a query-key form, or a score it does not have
    ├── AttentionError     *       arguments of an attention function that do not fit each other
    ├── SurgeryError       *       a model that cannot be changed as asked
    ├── DynamicsError      *       a question about training that has no answer
    ├── ExperimentError    *       an option of an experiment that cannot be
    ├── TrainingError              a training that cannot begin or go on: its folder, its checkpoints, its loss
    ├── DataError                  text, a tokenizer or a cache of tokens that cannot be trained on
    ├── RecordError                a table cannot be saved or loaded
    └── MissingExtra               a feature needs a package of an optional extra

Each message says what was found, where, and what would work. Those with a * are ValueErrors too: what a function was
given does not fit. The others are about what stands on a disk or in a network. MissingExtra is an ImportError.
"""

from __future__ import annotations


class QKFormError(Exception):
    """The base of every error that qkform raises on purpose."""


class SourceError(QKFormError):
    """The source cannot be opened: missing, not a checkpoint, or of a kind that is not read yet."""


class CheckpointError(SourceError):
    """The file is damaged or hostile: its bytes are not what its format promises."""


class ConfigError(QKFormError, ValueError):
    """An option is none of those that can be; or a config is missing, unreadable, or contradicts the weights."""


class LayoutError(QKFormError):
    """Which tensors are Q and K, or how they are stored, is not known."""


class FormError(QKFormError, ValueError):
    """Arrays that do not make a query-key form, or a score that this form does not have."""


class AttentionError(QKFormError, ValueError):
    """Arguments of an attention function that do not fit each other, or that the implementation cannot take."""


class SurgeryError(QKFormError, ValueError):
    """A model that cannot be changed as asked: no attention in it, changed before, or of a kind that has no room."""


class DynamicsError(QKFormError, ValueError):
    """A question about training that has no answer: a task that cannot be, a loss or a sharpness not reached."""


class ExperimentError(QKFormError, ValueError):
    """An option of an experiment that does not exist, has a value it cannot have, or contradicts another."""


class TrainingError(QKFormError):
    """A training that cannot begin or go on: its folder, its checkpoints, its loss."""


class DataError(QKFormError):
    """Text, a tokenizer or a cache of tokens that cannot be trained on: damaged, empty, changed, or not fitting."""


class RecordError(QKFormError):
    """A table cannot be saved to, or loaded from, the place that was named."""


class MissingExtra(QKFormError, ImportError):
    """A feature needs a package that an optional extra brings."""


def prefixed(error: QKFormError, where: str) -> QKFormError:
    """An error with the place in front of its message: of the same kind, or of the kind above that stands here.

    Parts of the package have errors of their own, built from other things than a text; those end here.
    """
    return worded(error, f"{where}: {error}" if where else str(error))


def worded(error: QKFormError, text: str) -> QKFormError:
    """An error with another message, of the same kind, or of the kind above that stands here."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind(text)  # type: ignore[no-any-return]

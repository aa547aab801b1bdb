"""The public names of ``mirror.keras``: Keras layers for mirrored models. Imports Keras."""

try:
    from mirror.replica.keras.keras_normalization import SyncBatchNormalization
except ModuleNotFoundError as error:  # Keras, or another library that it would compute with
    raise ModuleNotFoundError(
        f"{error}; mirror.keras takes Keras over torch: pip install 'mirror-strategy[keras]', and "
        'os.environ["KERAS_BACKEND"] = "torch" before Keras is imported',
        name=error.name,
    ) from error

__all__ = ["SyncBatchNormalization"]

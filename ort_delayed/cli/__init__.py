"""The command line ``ort-delayed``: a file per command, which calls the library and prints what its reports say.

Nothing here is imported before it is needed: ``ort-delayed --help`` loads neither ONNX Runtime nor onnx.
"""

from ort_delayed.cli.main import main

__all__ = ["main"]

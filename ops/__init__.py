"""The op ``ai.rt::DelayedInitializer``: schema, rules for its attributes, kernel, reference implementation."""

from ort_delayed.ops.errors import DelayedInitializerError
from ort_delayed.ops.node import make_node
from ort_delayed.ops.op_schema import register_schema, schema
from ort_delayed.ops.reference import DelayedInitializer

__all__ = ["DelayedInitializer", "DelayedInitializerError", "make_node", "schema"]

register_schema()

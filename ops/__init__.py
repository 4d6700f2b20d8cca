"""The op ``ai.rt::DelayedInitializer``: schema, rules for its attributes, kernel, reference implementation."""

from ort_delayed.ops.node import make_node
from ort_delayed.ops.op_schema import register_schema, schema

__all__ = ["make_node", "schema"]

register_schema()

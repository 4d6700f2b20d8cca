"""ort-delayed: ONNX Runtime models whose weights arrive when they are needed."""

"""TensorRT engines: the plugin library and what is built around it."""

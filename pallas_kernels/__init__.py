"""GPU kernels: arrays in, arrays out, one folder a kernel. They know no mesh and no model."""

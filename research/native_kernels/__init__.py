"""Errors of the native kernels on drawn attention problems, on every instruction set, against float64."""

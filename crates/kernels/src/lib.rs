//! longreach-kernels

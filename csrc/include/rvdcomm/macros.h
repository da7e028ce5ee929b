// RVD_HD marks functions for host and device. So the C++ tests run the code of the kernels.
// RVD_HD_CALL marks large functions of this kind, with one instance per dtype. They are called, not
// inlined, so that every instance is compiled once.
// RVD_UNROLL precedes a loop over an array that must be kept in registers.
#pragma once

#if defined(__CUDACC__)
#define RVD_UNROLL _Pragma("unroll")
#define RVD_HD __host__ __device__ __forceinline__
#define RVD_HD_CALL __host__ __device__ __noinline__
#elif defined(__GNUC__)
#define RVD_UNROLL
// Always inlined: each caller then compiles and vectorises the functor for its own instruction set.
#define RVD_HD inline __attribute__((always_inline))
#define RVD_HD_CALL inline __attribute__((noinline))
#else
#define RVD_UNROLL
#define RVD_HD inline
#define RVD_HD_CALL inline
#endif

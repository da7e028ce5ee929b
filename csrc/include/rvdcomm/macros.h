// RVD_HD marks what runs on the host and on the device; the CPU tests run the kernels' own lines.
// RVD_HD_CALL marks the same where it is large, one a dtype: compiled once and called.
// RVD_UNROLL stands before a loop over an array that is to be in registers.
#pragma once

#if defined(__CUDACC__)
#define RVD_UNROLL _Pragma("unroll")
#define RVD_HD __host__ __device__ __forceinline__
#define RVD_HD_CALL __host__ __device__ __noinline__
#elif defined(__GNUC__)
#define RVD_UNROLL
// Always inline, so that the same functor is vectorised for every instruction set it is used in.
#define RVD_HD inline __attribute__((always_inline))
#define RVD_HD_CALL inline __attribute__((noinline))
#else
#define RVD_UNROLL
#define RVD_HD inline
#define RVD_HD_CALL inline
#endif

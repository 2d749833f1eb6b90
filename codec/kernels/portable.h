// What differs between g++, nvcc and NVRTC, and nothing else. Scalar code only: no libc, no STL.
#ifndef KV_PORTABLE_H
#define KV_PORTABLE_H

#if defined(__CUDACC_RTC__)  // NVRTC has no <stdint.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#if defined(__CUDACC__)
#define KV_FN static __host__ __device__ __forceinline__
#else
#define KV_FN static inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define KV_ON_DEVICE 1
#else
#define KV_ON_DEVICE 0
#endif

KV_FN uint32_t kv_bits_of_float(float value) {
#if KV_ON_DEVICE
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

KV_FN float kv_float_of_bits(uint32_t bits) {
#if KV_ON_DEVICE
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// What a kernel says about a block. Python turns it into an exception (codec/native.py).
enum kv_status {
  KV_OK = 0,
  KV_TRUNCATED = 1,      // the block ends before its last symbol
  KV_TRAILING = 2,       // words are left after the last symbol
  KV_WRONG_STATE = 3,    // a lane does not end in the state that every encoder starts from
  KV_BAD_SCALE = 4,      // an int8 scale that no encoder writes
  KV_BAD_CLASS = 5,      // a token class that no encoder writes
};

#endif

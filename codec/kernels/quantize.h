// Numbers to symbols and back, one value at a time. Float32 throughout, one rounding per operation
// (built without contraction to fused multiply-add), halves converted by integer arithmetic: CPU, GPU and
// codec/reference.py agree on every bit. Never produces or relies on denormal floats.
#ifndef KV_QUANTIZE_H
#define KV_QUANTIZE_H

#include "portable.h"

#define KV_HALF_MAX 65504.0f
#define KV_SYMBOL_MAX 32767.0f

// Exact, for finite halves.
KV_FN float kv_float_of_half(uint16_t half) {
  uint32_t magnitude = ((uint32_t)half & 0x7fffu) << 13;
  uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
  float normal = kv_float_of_bits(magnitude + (112u << 23));
  float tiny = kv_float_of_bits(magnitude + (113u << 23)) - kv_float_of_bits(113u << 23);
  float value = magnitude < (1u << 23) ? tiny : normal;
  return kv_float_of_bits(kv_bits_of_float(value) | sign);
}

// Rounds to nearest even and saturates at +-65504; the argument is not NaN.
KV_FN uint16_t kv_half_of_float(float value) {
  uint32_t bits = kv_bits_of_float(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  magnitude = magnitude > 0x477fe000u ? 0x477fe000u : magnitude;
  uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // 0.5 has an ulp of 2^-24, which is the step of subnormal halves: the addition rounds.
  uint32_t tiny = kv_bits_of_float(kv_float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  return (uint16_t)(sign | (magnitude < 0x38800000u ? tiny : normal));
}

// To the nearest integer, ties to even, for |value| <= 2^22: the sum's ulp is 1.
KV_FN float kv_round(float value) { return (value + 12582912.0f) - 12582912.0f; }

KV_FN float kv_clamp(float value, float limit) {
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

// Symbol of a value: value / step, saturating at +-32767.
KV_FN int32_t kv_quantize(float value, float inverse_step) {
  return (int32_t)kv_round(kv_clamp(value * inverse_step, KV_SYMBOL_MAX));
}

// Scale of an int8 row: absmax / 127 as a half, rounded up where the largest value would clip; 0 for zeros.
KV_FN uint16_t kv_int8_scale(float absmax) {
  uint16_t half = kv_half_of_float(absmax / 127.0f);
  return (uint16_t)(half + (kv_float_of_half(half) * 127.0f < absmax));
}

KV_FN int32_t kv_int8_symbol(float value, float scale) {
  float divisor = scale > 0.0f ? scale : 1.0f;
  return (int32_t)kv_round(kv_clamp(value / divisor, 127.0f));
}

// First token of a group: its own symbol. The others: distance from the decoded anchor.
KV_FN float kv_dequantize(float anchor, int32_t symbol, float step) {
  return anchor + (float)symbol * step;
}

#endif

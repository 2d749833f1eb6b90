// The CUDA module: launch code around the same headers as entry_cpu.cpp. Compiled at run time by NVRTC
// (codec/cuda.py) with --fmad=false, so that it rounds like the CPU. One warp owns one block; lane i of
// the warp is lane i of the coder.
#include "cachegen.h"
#include "quantize.h"
#include "rangecoder.h"

struct kv_shape {
  int32_t num_layers, num_heads, head_dim, num_tokens, block_tokens, is_half;
};

struct kv_block {
  int64_t row, stride, channel;
  uint32_t tokens, groups, lanes;
};

__device__ kv_block kv_locate(const kv_shape& s, int64_t index) {
  int64_t spans = (s.num_tokens + s.block_tokens - 1) / s.block_tokens;
  int64_t span = index % spans, column = index / spans;  // column = (layer * 2 + kv) * heads + head
  int64_t head = column % s.num_heads, side = column / s.num_heads;
  int64_t first = span * s.block_tokens, left = s.num_tokens - first;
  kv_block block;
  block.stride = (int64_t)s.num_heads * s.head_dim;
  block.row = (side * s.num_tokens + first) * block.stride + head * s.head_dim;
  block.channel = column * s.head_dim;
  block.tokens = (uint32_t)(left < s.block_tokens ? left : s.block_tokens);
  block.groups = kv_num_groups(block.tokens);
  block.lanes = kv_num_lanes(block.tokens);
  return block;
}

__device__ float kv_load(const void* kv, int64_t at, int32_t is_half) {
  return is_half ? kv_float_of_half(((const uint16_t*)kv)[at]) : ((const float*)kv)[at];
}

__device__ void kv_store(void* kv, int64_t at, int32_t is_half, float value) {
  if (is_half)
    ((uint16_t*)kv)[at] = kv_half_of_float(value);
  else
    ((float*)kv)[at] = value;
}

#define KV_ALL_LANES 0xffffffffu

// Symbols lie as [block][dim][block_tokens]; see cachegen.h for the order in a channel.
extern "C" __global__ void kv_cachegen_decode_symbols(
    kv_shape s, int64_t num_blocks, const uint8_t* payload, const uint32_t* offsets,
    const kv_table* tables, const uint32_t* entries, const uint16_t* anchor_table,
    const int16_t* anchor_shift, const uint16_t* delta_table, int16_t* symbols, int32_t* status) {
  const uint32_t lane = threadIdx.x & 31u;
  const int64_t index = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (index >= num_blocks) return;  // the whole warp
  const kv_block block = kv_locate(s, index);
  const uint16_t* words = (const uint16_t*)(payload + offsets[index]);
  const uint32_t size = offsets[index + 1] - offsets[index];
  const uint32_t num_words = size / 2u;
  if (size % 2u || num_words < 2u * block.lanes) {
    if (lane == 0) status[index] = size % 2u ? KV_TRAILING : KV_TRUNCATED;
    return;
  }
  uint32_t state = KV_STATE_LOW;
  if (lane < block.lanes)
    state = (uint32_t)words[2u * lane] | ((uint32_t)words[2u * lane + 1u] << 16);
  uint32_t next = 2u * block.lanes;
  const uint32_t below = (1u << lane) - 1u;
  for (int32_t run = 0; run < 2 * s.head_dim; ++run) {
    const int64_t channel = block.channel + run / 2;
    const bool anchors = run % 2 == 0;
    const uint32_t number = anchors ? anchor_table[channel] : delta_table[channel];
    const int32_t shift = anchors ? anchor_shift[channel] : 0;
    const uint32_t length = anchors ? block.groups : block.tokens - block.groups;
    const uint32_t* slots = entries + (int64_t)number * KV_PROB_SCALE;
    const uint32_t escape = tables[number].num_symbols - 1u;
    const int32_t low = tables[number].low + shift;
    int16_t* out = symbols + (index * s.head_dim + run / 2) * (int64_t)s.block_tokens +
                   (anchors ? 0 : block.groups);
    for (uint32_t start = 0; start < length; start += block.lanes) {
      const bool active = lane < block.lanes && start + lane < length;
      uint32_t place = 0;
      int32_t value = 0;
      if (active) {
        const uint32_t entry = slots[kv_slot(state)];
        state = kv_decode_advance(state, entry);
        place = kv_entry_index(entry);
        value = low + (int32_t)place;
      }
      bool takes = active && kv_needs_word(state);
      uint32_t takers = __ballot_sync(KV_ALL_LANES, takes);
      if (takes) {
        const uint32_t at = next + __popc(takers & below);
        state = kv_take_word(state, at < num_words ? words[at] : 0u);
      }
      next += __popc(takers);
      takes = active && place == escape;
      takers = __ballot_sync(KV_ALL_LANES, takes);
      if (takers) {
        if (takes) {
          const uint32_t at = next + __popc(takers & below);
          value = (int32_t)(int16_t)(state & 0xffffu) + shift;
          state = kv_take_word(state >> 16, at < num_words ? words[at] : 0u);
        }
        next += __popc(takers);
      }
      if (active) out[start + lane] = (int16_t)value;
    }
  }
  const uint32_t wrong =
      __ballot_sync(KV_ALL_LANES, lane < block.lanes && state != KV_STATE_LOW);
  if (lane == 0)
    status[index] = next > num_words   ? KV_TRUNCATED
                    : next < num_words ? KV_TRAILING
                    : wrong            ? KV_WRONG_STATE
                                       : KV_OK;
}

// One thread per group and channel. The grid's x axis is the block.
extern "C" __global__ void kv_cachegen_dequantize(kv_shape s, const int16_t* symbols,
                                                  const float* anchor_step, const float* delta_step,
                                                  void* kv) {
  const int64_t index = blockIdx.x;
  const kv_block block = kv_locate(s, index);
  const uint32_t item = blockIdx.y * blockDim.x + threadIdx.x;
  const uint32_t group = item / (uint32_t)s.head_dim, dim = item % (uint32_t)s.head_dim;
  if (group >= block.groups) return;
  const int16_t* from = symbols + (index * s.head_dim + dim) * (int64_t)s.block_tokens;
  const float anchor = kv_anchor_value(from[group], anchor_step[block.channel + dim]);
  const float step = delta_step[block.channel + dim];
  const uint32_t first = group * KV_GROUP_TOKENS;
  for (uint32_t token = first; token < first + KV_GROUP_TOKENS && token < block.tokens; ++token) {
    float value = anchor;
    if (token != first)
      value = kv_dequantize(anchor, from[kv_symbol_place(token, block.groups)], step);
    kv_store(kv, block.row + token * block.stride + dim, s.is_half, value);
  }
}

extern "C" __global__ void kv_cachegen_quantize(kv_shape s, const void* kv, const float* anchor_step,
                                                const float* delta_step, int16_t* symbols) {
  const int64_t index = blockIdx.x;
  const kv_block block = kv_locate(s, index);
  const uint32_t item = blockIdx.y * blockDim.x + threadIdx.x;
  const uint32_t group = item / (uint32_t)s.head_dim, dim = item % (uint32_t)s.head_dim;
  if (group >= block.groups) return;
  int16_t* to = symbols + (index * s.head_dim + dim) * (int64_t)s.block_tokens;
  const float step = anchor_step[block.channel + dim];
  const float inverse = 1.0f / delta_step[block.channel + dim];
  const uint32_t first = group * KV_GROUP_TOKENS;
  float anchor = 0.0f;
  for (uint32_t token = first; token < first + KV_GROUP_TOKENS && token < block.tokens; ++token) {
    const float value = kv_load(kv, block.row + token * block.stride + dim, s.is_half);
    int32_t symbol;
    if (token == first) {
      symbol = kv_quantize(value, 1.0f / step);
      anchor = kv_anchor_value(symbol, step);
    } else {
      symbol = kv_quantize(value - anchor, inverse);
    }
    to[kv_symbol_place(token, block.groups)] = (int16_t)symbol;
  }
}

// Writes each block against the end of its space of space_bytes; see kv_encode_run for the order.
extern "C" __global__ void kv_cachegen_encode_symbols(
    kv_shape s, int64_t num_blocks, const int16_t* symbols, const kv_table* tables,
    const kv_encode_symbol* encode_symbols, const uint16_t* anchor_table, const int16_t* anchor_shift,
    const uint16_t* delta_table, uint8_t* output, int64_t space_bytes, uint32_t* sizes) {
  const uint32_t lane = threadIdx.x & 31u;
  const int64_t index = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (index >= num_blocks) return;  // the whole warp
  const kv_block block = kv_locate(s, index);
  uint16_t* space = (uint16_t*)(output + index * space_bytes);
  int64_t next = space_bytes / 2;
  const uint32_t above = lane == 31u ? 0u : KV_ALL_LANES << (lane + 1u);
  uint32_t state = KV_STATE_LOW;
  for (int32_t run = 2 * s.head_dim; run-- > 0;) {
    const int64_t channel = block.channel + run / 2;
    const bool anchors = run % 2 == 0;
    const uint32_t number = anchors ? anchor_table[channel] : delta_table[channel];
    const int32_t shift = anchors ? anchor_shift[channel] : 0;
    const uint32_t length = anchors ? block.groups : block.tokens - block.groups;
    const kv_encode_symbol* entry_of = encode_symbols + tables[number].first;
    const uint32_t escape = tables[number].num_symbols - 1u;
    const int32_t low = tables[number].low + shift;
    const int16_t* from = symbols + (index * s.head_dim + run / 2) * (int64_t)s.block_tokens +
                          (anchors ? 0 : block.groups);
    for (uint32_t step = (length + block.lanes - 1u) / block.lanes; step-- > 0;) {
      const uint32_t at = step * block.lanes + lane;
      const bool active = lane < block.lanes && at < length;
      const int32_t value = active ? from[at] : 0;
      uint32_t place = (uint32_t)(value - low);
      place = place >= escape ? escape : place;
      bool gives = active && place == escape;
      uint32_t givers = __ballot_sync(KV_ALL_LANES, gives);
      if (givers) {
        if (gives) {
          space[next - 1 - __popc(givers & above)] = (uint16_t)state;
          state = ((state >> 16) << 16) | ((uint32_t)(value - shift) & 0xffffu);
        }
        next -= __popc(givers);
      }
      const kv_encode_symbol entry = entry_of[active ? place : 0u];
      gives = active && state >= entry.limit;
      givers = __ballot_sync(KV_ALL_LANES, gives);
      if (gives) {
        space[next - 1 - __popc(givers & above)] = (uint16_t)state;
        state >>= 16;
      }
      next -= __popc(givers);
      if (active)
        state = kv_encode_advance(state, entry.reciprocal, entry.frequency, entry.cumulative);
    }
  }
  next -= 2 * (int64_t)block.lanes;
  if (lane < block.lanes) {
    space[next + 2 * lane] = (uint16_t)state;
    space[next + 2 * lane + 1] = (uint16_t)(state >> 16);
  }
  if (lane == 0) sizes[index] = (uint32_t)(space_bytes - 2 * next);
}

// Level set klt on CUDA: launch code around klt.h. Compiled at run time by NVRTC (codec/klt_cuda.py) with
// --fmad=false, so that it rounds like the CPU. One warp owns one block; lane i of the warp is lane i of the
// coder. The matrix products between these kernels are cuBLAS's.
#include "klt.h"
#include "quantize.h"

#define KV_ALL_LANES 0xffffffffu

struct kv_klt_shape {
  int64_t num_groups, num_tokens, block_tokens;
};

struct kv_klt_place {
  int64_t group, first;
  uint32_t tokens;
};

__device__ kv_klt_place kv_klt_locate(const kv_klt_shape& s, int64_t index) {
  const int64_t spans = (s.num_tokens + s.block_tokens - 1) / s.block_tokens;
  kv_klt_place place;
  place.group = index / spans;
  place.first = index % spans * s.block_tokens;
  const int64_t left = s.num_tokens - place.first;
  place.tokens = (uint32_t)(left < s.block_tokens ? left : s.block_tokens);
  return place;
}

// Takes words for the lanes that ask, lower lanes first; the warp asks together.
__device__ uint32_t kv_klt_refill(uint32_t state, bool takes, const uint16_t* words,
                                  uint32_t num_words, uint32_t below, uint32_t* next) {
  const uint32_t takers = __ballot_sync(KV_ALL_LANES, takes);
  if (takes) {
    const uint32_t at = *next + __popc(takers & below);
    state = kv_take_word(state, at < num_words ? words[at] : 0u);
  }
  *next += __popc(takers);
  return state;
}

extern "C" __global__ void kv_klt_decode_blocks(
    kv_klt_shape s, int64_t num_blocks, const kv_klt_group* groups, const kv_klt_component* components,
    const kv_table* tables, const uint32_t* entries, const uint8_t* payload, const uint32_t* offsets,
    float step, float* coefficients, int32_t* status) {
  const uint32_t lane = threadIdx.x & 31u;
  const int64_t index = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (index >= num_blocks) return;  // the whole warp
  const kv_klt_place place = kv_klt_locate(s, index);
  const kv_klt_group group = groups[place.group];
  const uint16_t* words = (const uint16_t*)(payload + offsets[index]);
  const uint32_t size = offsets[index + 1] - offsets[index];
  const uint32_t num_words = size / 2u;
  if (group.num_components == 0) {
    if (lane == 0) status[index] = size == 0 ? KV_OK : KV_TRAILING;
    return;
  }
  const uint32_t lanes = kv_klt_num_lanes(place.tokens);
  if (size % 2u || num_words < 2u * lanes) {
    if (lane == 0) status[index] = size % 2u ? KV_TRAILING : KV_TRUNCATED;
    return;
  }
  uint32_t state = KV_STATE_LOW;
  if (lane < lanes) state = (uint32_t)words[2u * lane] | ((uint32_t)words[2u * lane + 1u] << 16);
  uint32_t next = 2u * lanes;
  const uint32_t below = (1u << lane) - 1u;
  bool bad_class = false;
  for (uint32_t first = 0; first < place.tokens; first += lanes) {
    const bool active = lane < lanes && first + lane < place.tokens;
    int32_t activity = 0;
    float scale = 0.0f;
    float* out = coefficients + group.coefficients + place.first + first + lane;
    for (int64_t c = -1; c < (int64_t)group.num_components; ++c) {  // -1: the tokens' classes
      uint32_t table = group.class_table, escape = KV_KLT_CLASSES;
      int32_t low = 0;
      if (c >= 0) {
        const kv_klt_component& component = components[group.first_component + c];
        table = component.first_table + kv_klt_context(&component, activity);
        escape = component.escape;
        low = component.low;
      }
      uint32_t index_in_table = 0;
      int32_t value = 0;
      if (active) {
        const uint32_t entry = entries[(int64_t)table * KV_PROB_SCALE + kv_slot(state)];
        state = kv_decode_advance(state, entry);
        index_in_table = kv_entry_index(entry);
        value = low + (int32_t)index_in_table;
      }
      state = kv_klt_refill(state, active && kv_needs_word(state), words, num_words, below, &next);
      const bool escapes = active && index_in_table == escape;
      if (__any_sync(KV_ALL_LANES, escapes)) {
        if (escapes) value = (int32_t)(int16_t)(state & 0xffffu);
        const uint32_t longer =
            kv_klt_refill(state >> 16, escapes, words, num_words, below, &next);
        state = escapes ? longer : state;
      }
      if (c < 0) {
        bad_class = bad_class || (active && (uint32_t)value >= KV_KLT_CLASSES);
        value &= KV_KLT_CLASSES - 1;
        activity = kv_klt_start_activity(group.start_activity, (uint32_t)value);
        scale = step * kv_klt_class_scale((uint32_t)value);
      } else {
        if (active) out[c * s.num_tokens] = (float)value * scale;
        activity = kv_klt_next_activity(activity, value);
      }
    }
  }
  const uint32_t wrong = __ballot_sync(KV_ALL_LANES, lane < lanes && state != KV_STATE_LOW);
  const uint32_t bad = __ballot_sync(KV_ALL_LANES, bad_class);
  if (lane == 0)
    status[index] = bad                ? KV_BAD_CLASS
                    : next > num_words ? KV_TRUNCATED
                    : next < num_words ? KV_TRAILING
                    : wrong            ? KV_WRONG_STATE
                                       : KV_OK;
}

// The kernels' view of rows. The same fields as ROWS_DTYPE in codec/klt_cuda.py.
struct kv_klt_row_shape {
  int64_t first_layer, num_layers, num_heads, head_dim, num_tokens, half;
  int32_t interleaved, is_half;
};

__device__ float kv_klt_load(const void* kv, int64_t at, int32_t is_half) {
  return is_half ? kv_float_of_half(((const uint16_t*)kv)[at]) : ((const float*)kv)[at];
}

__device__ void kv_klt_store(void* kv, int64_t at, int32_t is_half, float value) {
  if (is_half)
    ((uint16_t*)kv)[at] = kv_half_of_float(value);
  else
    ((float*)kv)[at] = value;
}

// Where a number turns with: its partner in the head, and which of the pair it is. Not turned: partner < 0.
__device__ int64_t kv_klt_partner(const kv_klt_row_shape& s, int64_t dim, int64_t* pair, bool* second) {
  if (dim >= 2 * s.half) return -1;
  *pair = s.interleaved ? dim / 2 : dim % s.half;
  *second = s.interleaved ? dim % 2 != 0 : dim >= s.half;
  if (s.interleaved) return *second ? dim - 1 : dim + 1;
  return *second ? dim - s.half : dim + s.half;
}

// Rows [token][layer, kv, channel] into kv [layer, kv, token, head, dim] in place: one thread per number.
extern "C" __global__ void kv_klt_scatter_rows(kv_klt_row_shape s, const float* rows, const float* mean,
                                               const float* inverse, const float* cosine,
                                               const float* sine, const int32_t* table_of_layer,
                                               void* kv) {
  const int64_t channels = s.num_heads * s.head_dim, width = 2 * s.num_layers * channels;
  const int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= s.num_tokens * width) return;
  const int64_t token = item / width, place = item % width;
  const int64_t side = place / channels, channel = place % channels;
  const int64_t layer = s.first_layer + side / 2, plane = 2 * layer + side % 2;
  float value = rows[item] * inverse[plane * channels + channel] + mean[plane * channels + channel];
  int64_t pair = 0;
  bool second = false;
  const int64_t partner =
      side % 2 == 0 ? kv_klt_partner(s, channel % s.head_dim, &pair, &second) : -1;
  if (partner >= 0) {
    const int64_t other = channel - channel % s.head_dim + partner;
    const float b = rows[item + other - channel] * inverse[plane * channels + other] +
                    mean[plane * channels + other];
    const int64_t at = (table_of_layer[layer] * s.num_tokens + token) * s.half + pair;
    value = second ? value * cosine[at] + b * sine[at] : value * cosine[at] - b * sine[at];
  }
  kv_klt_store(kv, (plane * s.num_tokens + token) * channels + channel, s.is_half, value);
}

// The way there: kv to rows, keys turned back. One thread per number.
extern "C" __global__ void kv_klt_gather_rows(kv_klt_row_shape s, const void* kv, const float* mean,
                                              const float* weight, const float* cosine,
                                              const float* sine, const int32_t* table_of_layer,
                                              float* rows) {
  const int64_t channels = s.num_heads * s.head_dim, width = 2 * s.num_layers * channels;
  const int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= s.num_tokens * width) return;
  const int64_t token = item / width, place = item % width;
  const int64_t side = place / channels, channel = place % channels;
  const int64_t layer = s.first_layer + side / 2, plane = 2 * layer + side % 2;
  const int64_t row = (plane * s.num_tokens + token) * channels;
  float value = kv_klt_load(kv, row + channel, s.is_half);
  int64_t pair = 0;
  bool second = false;
  const int64_t partner =
      side % 2 == 0 ? kv_klt_partner(s, channel % s.head_dim, &pair, &second) : -1;
  if (partner >= 0) {
    const float b =
        kv_klt_load(kv, row + channel - channel % s.head_dim + partner, s.is_half);
    const int64_t at = (table_of_layer[layer] * s.num_tokens + token) * s.half + pair;
    value = second ? value * cosine[at] - b * sine[at] : value * cosine[at] + b * sine[at];
  }
  rows[item] = (value - mean[plane * channels + channel]) * weight[plane * channels + channel];
}

// Coefficients [component][token] to symbols. The grid's y axis is the component.
extern "C" __global__ void kv_klt_quantize_rows(const float* coefficients, const uint8_t* classes,
                                                int64_t num_tokens, float step, int16_t* symbols) {
  const int64_t token = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= num_tokens) return;
  const int64_t at = (int64_t)blockIdx.y * num_tokens + token;
  const float inverse = 1.0f / step;
  const float gain = kv_float_of_bits((127u - KV_KLT_NEUTRAL_CLASS + classes[token]) << 23);
  symbols[at] = (int16_t)kv_quantize(coefficients[at], inverse * gain);
}

// Encodes a block into space_bytes at output + index * space_bytes, written from the end. `table_of` is
// room for [block][component][32] table numbers, most components of any group.
extern "C" __global__ void kv_klt_encode_blocks(
    kv_klt_shape s, int64_t num_blocks, const kv_klt_group* groups, const kv_klt_component* components,
    const kv_table* tables, const kv_encode_symbol* encode_symbols, const int16_t* symbols,
    const uint8_t* classes, uint16_t* table_of, int64_t most_components, uint8_t* output,
    int64_t space_bytes, uint32_t* sizes) {
  const uint32_t lane = threadIdx.x & 31u;
  const int64_t index = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (index >= num_blocks) return;
  const kv_klt_place place = kv_klt_locate(s, index);
  const kv_klt_group group = groups[place.group];
  if (group.num_components == 0) {
    if (lane == 0) sizes[index] = 0;
    return;
  }
  uint16_t* space = (uint16_t*)(output + index * space_bytes);
  int64_t next = space_bytes / 2;
  const uint32_t lanes = kv_klt_num_lanes(place.tokens);
  const uint32_t above = lane == 31u ? 0u : ~0u << (lane + 1u);
  uint32_t state = KV_STATE_LOW;
  uint16_t* mine = table_of + index * most_components * 32 + lane;
  for (uint32_t tile = (place.tokens + lanes - 1u) / lanes; tile-- > 0;) {
    const uint32_t first = tile * lanes;
    const bool active = lane < lanes && first + lane < place.tokens;
    const int64_t token = place.first + first + lane;
    const uint32_t token_class = active ? classes[place.group * s.num_tokens + token] : 0u;
    const int16_t* from = symbols + group.coefficients + token;
    int32_t activity = kv_klt_start_activity(group.start_activity, token_class);
    for (uint32_t c = 0; c < group.num_components; ++c) {
      const kv_klt_component& component = components[group.first_component + c];
      mine[c * 32u] = (uint16_t)(component.first_table + kv_klt_context(&component, activity));
      activity = kv_klt_next_activity(activity, active ? from[c * s.num_tokens] : 0);
    }
    for (int64_t c = (int64_t)group.num_components - 1; c >= -1; --c) {  // -1: the tokens' classes
      const uint32_t table = c < 0 ? group.class_table : mine[c * 32];
      const int32_t value =
          c < 0 ? (int32_t)token_class : (active ? (int32_t)from[c * s.num_tokens] : 0);
      const uint32_t escape = tables[table].num_symbols - 1u;
      uint32_t at = (uint32_t)(value - tables[table].low);
      at = at < escape ? at : escape;
      bool gives = active && at == escape;
      uint32_t givers = __ballot_sync(KV_ALL_LANES, gives);
      if (gives) {
        space[next - 1 - __popc(givers & above)] = (uint16_t)state;
        state = ((state >> 16) << 16) | ((uint32_t)value & 0xffffu);
      }
      next -= __popc(givers);
      const kv_encode_symbol entry = encode_symbols[tables[table].first + at];
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
  next -= 2 * (int64_t)lanes;
  if (lane < lanes) {
    space[next + 2 * lane] = (uint16_t)state;
    space[next + 2 * lane + 1] = (uint16_t)(state >> 16);
  }
  if (lane == 0) sizes[index] = (uint32_t)(space_bytes - 2 * next);
}

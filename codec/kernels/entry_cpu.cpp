// The CPU library: loops over blocks and threads around the kernels' headers, with a C interface that
// codec/native.py loads through ctypes (which releases the GIL for each call). Every function trusts its
// arguments: Python has checked shapes, sizes and tables.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "cachegen.h"
#include "klt.h"
#include "quantize.h"
#include "rangecoder.h"

#define KV_EXPORT extern "C" __attribute__((visibility("default")))
#ifndef KV_SOURCE_DIGEST
#define KV_SOURCE_DIGEST "unknown"
#endif

// The same fields as Shape in codec/native.py.
struct kv_shape {
  int32_t num_layers, num_heads, head_dim, num_tokens, block_tokens, num_threads, is_half;
};

namespace {

const int kNoMemory = -1;

struct Block {
  int64_t row;        // of the block's first token: index of its first number in the kv array
  int64_t stride;     // numbers from one token to the next
  int64_t channel;    // index of its first channel among [layer, kv, head, dim]
  uint32_t tokens;
};

int64_t num_blocks_of(const kv_shape* s) {
  int64_t spans = (s->num_tokens + s->block_tokens - 1) / s->block_tokens;
  return (int64_t)s->num_layers * 2 * s->num_heads * spans;
}

Block locate(const kv_shape* s, int64_t index) {
  int64_t spans = (s->num_tokens + s->block_tokens - 1) / s->block_tokens;
  int64_t span = index % spans, column = index / spans;  // column = (layer * 2 + kv) * heads + head
  int64_t head = column % s->num_heads, side = column / s->num_heads;
  int64_t first = span * s->block_tokens, left = s->num_tokens - first;
  Block block;
  block.stride = (int64_t)s->num_heads * s->head_dim;
  block.row = (side * s->num_tokens + first) * block.stride + head * s->head_dim;
  block.channel = column * s->head_dim;
  block.tokens = (uint32_t)(left < s->block_tokens ? left : s->block_tokens);
  return block;
}

// Calls work(index, scratch of this thread) for every index. Scratch is made here, so that a thread
// never fails to allocate; a thread that cannot start leaves its share to the others.
template <class Scratch, class Work>
int for_each_block(int64_t count, int num_threads, size_t scratch_items, const Work& work) {
  try {
    if (num_threads > count) num_threads = (int)(count > 0 ? count : 1);
    std::vector<std::unique_ptr<Scratch>> scratch;
    for (int i = 0; i < num_threads; ++i) scratch.emplace_back(new Scratch(scratch_items));
    std::atomic<int64_t> next(0);
    auto loop = [&](Scratch* mine) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i, *mine);
    };
    std::vector<std::thread> threads;
    try {
      for (int i = 1; i < num_threads; ++i) threads.emplace_back(loop, scratch[i].get());
    } catch (...) {
    }
    loop(scratch[0].get());
    for (auto& thread : threads) thread.join();
    return KV_OK;
  } catch (...) {
    return kNoMemory;
  }
}

struct NoScratch {
  explicit NoScratch(size_t) {}
};

void load_row(const void* kv, int64_t at, bool is_half, uint32_t count, float* row) {
  if (is_half) {
    const uint16_t* source = (const uint16_t*)kv + at;
    for (uint32_t i = 0; i < count; ++i) row[i] = kv_float_of_half(source[i]);
  } else {
    std::memcpy(row, (const float*)kv + at, count * sizeof(float));
  }
}

void store_row(void* kv, int64_t at, bool is_half, uint32_t count, const float* row) {
  if (is_half) {
    uint16_t* target = (uint16_t*)kv + at;
    for (uint32_t i = 0; i < count; ++i) target[i] = kv_half_of_float(row[i]);
  } else {
    std::memcpy((float*)kv + at, row, count * sizeof(float));
  }
}

struct RowScratch {
  explicit RowScratch(size_t dim) : row(dim) {}
  std::vector<float> row;
};

}  // namespace

KV_EXPORT const char* kv_source_digest() { return KV_SOURCE_DIGEST; }

// First index whose magnitude exceeds the limit or that is NaN; -1 when there is none.
KV_EXPORT int64_t kv_find_bad(const void* kv, int64_t count, int is_half, float limit) {
  const uint32_t most = is_half ? kv_half_of_float(limit) : kv_bits_of_float(limit);
  const int64_t piece = 4096;
  for (int64_t start = 0; start < count; start += piece) {
    int64_t stop = start + piece < count ? start + piece : count;
    uint32_t bad = 0;
    if (is_half) {
      const uint16_t* half = (const uint16_t*)kv;
      for (int64_t i = start; i < stop; ++i) bad |= (half[i] & 0x7fffu) > most;
      for (int64_t i = start; bad && i < stop; ++i)
        if ((half[i] & 0x7fffu) > most) return i;
    } else {
      const float* full = (const float*)kv;
      for (int64_t i = start; i < stop; ++i) bad |= (kv_bits_of_float(full[i]) & 0x7fffffffu) > most;
      for (int64_t i = start; bad && i < stop; ++i)
        if ((kv_bits_of_float(full[i]) & 0x7fffffffu) > most) return i;
    }
  }
  return -1;
}

KV_EXPORT int kv_fp16_encode(const kv_shape* s, const void* kv, const uint32_t* offsets,
                             uint8_t* payload) {
  return for_each_block<RowScratch>(
      num_blocks_of(s), s->num_threads, s->head_dim, [&](int64_t index, RowScratch& scratch) {
        Block block = locate(s, index);
        uint16_t* target = (uint16_t*)(payload + offsets[index]);
        for (uint32_t t = 0; t < block.tokens; ++t) {
          int64_t at = block.row + t * block.stride;
          if (s->is_half) {
            std::memcpy(target, (const uint16_t*)kv + at, 2 * s->head_dim);
          } else {
            load_row(kv, at, false, s->head_dim, scratch.row.data());
            store_row(target, 0, true, s->head_dim, scratch.row.data());
          }
          target += s->head_dim;
        }
      });
}

KV_EXPORT int kv_fp16_decode(const kv_shape* s, const uint8_t* payload, const uint32_t* offsets,
                             void* kv) {
  return for_each_block<RowScratch>(
      num_blocks_of(s), s->num_threads, s->head_dim, [&](int64_t index, RowScratch& scratch) {
        Block block = locate(s, index);
        const uint16_t* source = (const uint16_t*)(payload + offsets[index]);
        for (uint32_t t = 0; t < block.tokens; ++t) {
          int64_t at = block.row + t * block.stride;
          if (s->is_half) {
            std::memcpy((uint16_t*)kv + at, source, 2 * s->head_dim);
          } else {
            load_row(source, 0, true, s->head_dim, scratch.row.data());
            store_row(kv, at, false, s->head_dim, scratch.row.data());
          }
          source += s->head_dim;
        }
      });
}

// A block of int8: scales as halves [token], then symbols [token][dim].
KV_EXPORT int kv_int8_encode(const kv_shape* s, const void* kv, const uint32_t* offsets,
                             uint8_t* payload) {
  return for_each_block<RowScratch>(
      num_blocks_of(s), s->num_threads, s->head_dim, [&](int64_t index, RowScratch& scratch) {
        Block block = locate(s, index);
        uint8_t* scales = payload + offsets[index];
        int8_t* symbols = (int8_t*)(scales + 2 * block.tokens);
        float* row = scratch.row.data();
        for (uint32_t t = 0; t < block.tokens; ++t) {
          load_row(kv, block.row + t * block.stride, s->is_half, s->head_dim, row);
          uint32_t largest = 0;  // of the magnitudes' bits, which order like the magnitudes
          for (int32_t i = 0; i < s->head_dim; ++i) {
            uint32_t bits = kv_bits_of_float(row[i]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
          }
          uint16_t half = kv_int8_scale(kv_float_of_bits(largest));
          std::memcpy(scales + 2 * t, &half, 2);
          float scale = kv_float_of_half(half);
          for (int32_t i = 0; i < s->head_dim; ++i)
            symbols[i] = (int8_t)kv_int8_symbol(row[i], scale);
          symbols += s->head_dim;
        }
      });
}

KV_EXPORT int kv_int8_decode(const kv_shape* s, const uint8_t* payload, const uint32_t* offsets,
                             void* kv, int32_t* status) {
  return for_each_block<RowScratch>(
      num_blocks_of(s), s->num_threads, s->head_dim, [&](int64_t index, RowScratch& scratch) {
        Block block = locate(s, index);
        const uint8_t* scales = payload + offsets[index];
        const int8_t* symbols = (const int8_t*)(scales + 2 * block.tokens);
        float* row = scratch.row.data();
        status[index] = KV_OK;
        for (uint32_t t = 0; t < block.tokens; ++t) {
          uint16_t half;
          std::memcpy(&half, scales + 2 * t, 2);
          if (half > 0x7bffu) status[index] = KV_BAD_SCALE;  // negative, infinite or NaN
          float scale = kv_float_of_half(half);
          for (int32_t i = 0; i < s->head_dim; ++i) row[i] = (float)symbols[i] * scale;
          store_row(kv, block.row + t * block.stride, s->is_half, s->head_dim, row);
          symbols += s->head_dim;
        }
      });
}

// ---- runs of symbols: the entropy coder alone ---------------------------------------------------------

// Tables of a profile. The same fields as Tables in codec/native.py.
struct kv_tables {
  const kv_table* tables;
  const kv_encode_symbol* symbols;
  const uint32_t* entries;  // [table][4096]
};

namespace {

struct BlockSpan {  // the same fields as BLOCK_DTYPE in codec/entropy.py
  uint64_t first_run;
  uint64_t first_symbol;
  uint64_t space;  // byte offset of the block's space in the output, or of the block in the input
  uint32_t num_runs;
  uint32_t num_lanes;
};
static_assert(sizeof(BlockSpan) == 32, "shared with NumPy");

}  // namespace

// Encodes blocks into spaces of kv_max_block_bytes each, written from the end; sizes[i] bytes of block i
// end where its space ends.
KV_EXPORT int kv_encode_blocks(const kv_tables* tables, const BlockSpan* blocks, int64_t num_blocks,
                               const kv_run* runs, const int16_t* values, uint8_t* output,
                               const uint64_t* space_bytes, uint32_t* sizes, int num_threads) {
  return for_each_block<NoScratch>(num_blocks, num_threads, 0, [&](int64_t index, NoScratch&) {
    const BlockSpan& block = blocks[index];
    uint16_t* space = (uint16_t*)(output + block.space);
    kv_encoder coder;
    kv_encoder_start(&coder, block.num_lanes, space, space_bytes[index] / 2);
    uint64_t at = block.first_symbol;
    for (uint32_t i = 0; i < block.num_runs; ++i) at += runs[block.first_run + i].length;
    for (uint32_t i = block.num_runs; i-- > 0;) {
      const kv_run& run = runs[block.first_run + i];
      at -= run.length;
      kv_encode_run(&coder, tables->symbols, &tables->tables[run.table], run.shift, values + at,
                    run.length);
    }
    uint16_t* begin = kv_encoder_finish(&coder);
    sizes[index] = (uint32_t)((uint8_t*)(space + space_bytes[index] / 2) - (uint8_t*)begin);
  });
}

KV_EXPORT int kv_decode_blocks(const kv_tables* tables, const BlockSpan* blocks, int64_t num_blocks,
                               const kv_run* runs, const uint8_t* input, const uint32_t* sizes,
                               int16_t* values, int32_t* status, int num_threads) {
  return for_each_block<NoScratch>(num_blocks, num_threads, 0, [&](int64_t index, NoScratch&) {
    const BlockSpan& block = blocks[index];
    kv_decoder coder;
    status[index] = sizes[index] % 2
                        ? KV_TRAILING
                        : kv_decoder_start(&coder, block.num_lanes,
                                           (const uint16_t*)(input + block.space), sizes[index] / 2);
    if (status[index] != KV_OK) return;
    int16_t* target = values + block.first_symbol;
    for (uint32_t i = 0; i < block.num_runs; ++i) {
      const kv_run& run = runs[block.first_run + i];
      kv_decode_run(&coder, tables->entries + (size_t)run.table * KV_PROB_SCALE,
                    &tables->tables[run.table], run.shift, target, run.length);
      target += run.length;
    }
    status[index] = kv_decoder_finish(&coder);
  });
}

// ---- cachegen -------------------------------------------------------------------------------------------

// Statistics of one level, per channel [layer, kv, head, dim]. The same fields as in codec/native.py.
struct kv_cachegen_level {
  const float* anchor_step;
  const float* delta_step;
  const int16_t* anchor_shift;
  const uint16_t* anchor_table;
  const uint16_t* delta_table;
};

namespace {

// Channels lie an odd number of cache lines apart: writing one token touches all of them, and an even
// stride would map them to a few sets of the first-level cache.
uint32_t symbol_stride(uint32_t num_tokens) { return (((num_tokens + 31u) / 32u) | 1u) * 32u; }

struct GroupScratch {
  explicit GroupScratch(size_t items)
      : symbols(items), row(0), anchor(0), tile(0) {}
  void fit(size_t dim) {
    row.resize(dim);
    anchor.resize(dim);
    inverse.resize(2 * dim);
    tile.resize(KV_GROUP_TOKENS * dim);
  }
  std::vector<int16_t> symbols;  // [dim][stride]
  std::vector<float> row, anchor, inverse;
  std::vector<int16_t> tile;  // [10][dim]
};

void quantize_block(const kv_shape* s, const kv_cachegen_level* level, const void* kv,
                    const Block& block, GroupScratch* scratch) {
  const uint32_t dim = s->head_dim, stride = symbol_stride(block.tokens);
  const uint32_t num_groups = kv_num_groups(block.tokens);
  const float* anchor_step = level->anchor_step + block.channel;
  float* inverse_anchor = scratch->inverse.data();
  float* inverse_delta = inverse_anchor + dim;
  for (uint32_t c = 0; c < dim; ++c) {
    inverse_anchor[c] = 1.0f / anchor_step[c];
    inverse_delta[c] = 1.0f / level->delta_step[block.channel + c];
  }
  float* row = scratch->row.data();
  float* anchor = scratch->anchor.data();
  int16_t* tile = scratch->tile.data();
  int16_t* symbols = scratch->symbols.data();
  for (uint32_t group = 0; group < num_groups; ++group) {
    uint32_t first = group * KV_GROUP_TOKENS, count = block.tokens - first;
    if (count > KV_GROUP_TOKENS) count = KV_GROUP_TOKENS;
    for (uint32_t member = 0; member < count; ++member) {
      load_row(kv, block.row + (first + member) * block.stride, s->is_half, dim, row);
      int16_t* to = tile + member * dim;
      if (member == 0) {
        for (uint32_t c = 0; c < dim; ++c) {
          int32_t symbol = kv_quantize(row[c], inverse_anchor[c]);
          to[c] = (int16_t)symbol;
          anchor[c] = kv_anchor_value(symbol, anchor_step[c]);
        }
      } else {
        for (uint32_t c = 0; c < dim; ++c)
          to[c] = (int16_t)kv_quantize(row[c] - anchor[c], inverse_delta[c]);
      }
    }
    int16_t* deltas = symbols + num_groups + group * (KV_GROUP_TOKENS - 1u);
    for (uint32_t c = 0; c < dim; ++c) {
      symbols[c * (size_t)stride + group] = tile[c];
      for (uint32_t member = 1; member < count; ++member)
        deltas[c * (size_t)stride + member - 1] = tile[member * dim + c];
    }
  }
}

void dequantize_block(const kv_shape* s, const kv_cachegen_level* level, void* kv, const Block& block,
                      GroupScratch* scratch) {
  const uint32_t dim = s->head_dim, stride = symbol_stride(block.tokens);
  const uint32_t num_groups = kv_num_groups(block.tokens);
  const float* anchor_step = level->anchor_step + block.channel;
  const float* delta_step = level->delta_step + block.channel;
  float* row = scratch->row.data();
  float* anchor = scratch->anchor.data();
  int16_t* tile = scratch->tile.data();
  const int16_t* symbols = scratch->symbols.data();
  for (uint32_t group = 0; group < num_groups; ++group) {
    uint32_t first = group * KV_GROUP_TOKENS, count = block.tokens - first;
    if (count > KV_GROUP_TOKENS) count = KV_GROUP_TOKENS;
    const int16_t* deltas = symbols + num_groups + group * (KV_GROUP_TOKENS - 1u);
    for (uint32_t c = 0; c < dim; ++c) {
      tile[c] = symbols[c * (size_t)stride + group];
      for (uint32_t member = 1; member < count; ++member)
        tile[member * dim + c] = deltas[c * (size_t)stride + member - 1];
    }
    for (uint32_t c = 0; c < dim; ++c) anchor[c] = kv_anchor_value(tile[c], anchor_step[c]);
    store_row(kv, block.row + first * block.stride, s->is_half, dim, anchor);
    for (uint32_t member = 1; member < count; ++member) {
      const int16_t* from = tile + member * dim;
      for (uint32_t c = 0; c < dim; ++c) row[c] = kv_dequantize(anchor[c], from[c], delta_step[c]);
      store_row(kv, block.row + (first + member) * block.stride, s->is_half, dim, row);
    }
  }
}

}  // namespace

// Encodes a chunk. Block i's space is output[i * space_bytes ...); its sizes[i] bytes end where it ends.
KV_EXPORT int kv_cachegen_encode(const kv_shape* s, const kv_cachegen_level* level,
                                 const kv_tables* tables, const void* kv, uint8_t* output,
                                 uint64_t space_bytes, uint32_t* sizes) {
  uint32_t most = s->num_tokens < s->block_tokens ? s->num_tokens : s->block_tokens;
  return for_each_block<GroupScratch>(
      num_blocks_of(s), s->num_threads, (size_t)symbol_stride(most) * s->head_dim,
      [&](int64_t index, GroupScratch& scratch) {
        Block block = locate(s, index);
        scratch.fit(s->head_dim);
        quantize_block(s, level, kv, block, &scratch);
        const uint32_t groups = kv_num_groups(block.tokens), stride = symbol_stride(block.tokens);
        uint16_t* space = (uint16_t*)(output + index * space_bytes);
        kv_encoder coder;
        kv_encoder_start(&coder, kv_num_lanes(block.tokens), space, space_bytes / 2);
        for (uint32_t c = s->head_dim; c-- > 0;) {
          const int16_t* symbols = scratch.symbols.data() + c * (size_t)stride;
          int64_t channel = block.channel + c;
          kv_encode_run(&coder, tables->symbols, &tables->tables[level->delta_table[channel]], 0,
                        symbols + groups, block.tokens - groups);
          kv_encode_run(&coder, tables->symbols, &tables->tables[level->anchor_table[channel]],
                        level->anchor_shift[channel], symbols, groups);
        }
        uint16_t* begin = kv_encoder_finish(&coder);
        sizes[index] = (uint32_t)((uint8_t*)(space + space_bytes / 2) - (uint8_t*)begin);
      });
}

KV_EXPORT int kv_cachegen_decode(const kv_shape* s, const kv_cachegen_level* level,
                                 const kv_tables* tables, const uint8_t* payload,
                                 const uint32_t* offsets, void* kv, int32_t* status) {
  uint32_t most = s->num_tokens < s->block_tokens ? s->num_tokens : s->block_tokens;
  return for_each_block<GroupScratch>(
      num_blocks_of(s), s->num_threads, (size_t)symbol_stride(most) * s->head_dim,
      [&](int64_t index, GroupScratch& scratch) {
        Block block = locate(s, index);
        scratch.fit(s->head_dim);
        const uint32_t groups = kv_num_groups(block.tokens), stride = symbol_stride(block.tokens);
        kv_decoder coder;
        const uint32_t size = offsets[index + 1] - offsets[index];
        status[index] = size % 2 ? KV_TRAILING
                                 : kv_decoder_start(&coder, kv_num_lanes(block.tokens),
                                                    (const uint16_t*)(payload + offsets[index]),
                                                    size / 2);
        if (status[index] != KV_OK) return;
        for (uint32_t c = 0; c < (uint32_t)s->head_dim; ++c) {
          int16_t* symbols = scratch.symbols.data() + c * (size_t)stride;
          int64_t channel = block.channel + c;
          uint32_t anchors = level->anchor_table[channel], deltas = level->delta_table[channel];
          kv_decode_run(&coder, tables->entries + (size_t)anchors * KV_PROB_SCALE,
                        &tables->tables[anchors], level->anchor_shift[channel], symbols, groups);
          kv_decode_run(&coder, tables->entries + (size_t)deltas * KV_PROB_SCALE,
                        &tables->tables[deltas], 0, symbols + groups, block.tokens - groups);
        }
        status[index] = kv_decoder_finish(&coder);
        if (status[index] == KV_OK) dequantize_block(s, level, kv, block, &scratch);
      });
}

// ---- klt ------------------------------------------------------------------------------------------------

#include "klt_cpu.h"

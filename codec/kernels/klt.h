// What the entropy coder of level set klt adds to rangecoder.h: which table codes which symbol.
// Integers only, so that CPU and GPU agree on every symbol. Derivation: docs/bitstream.md, "klt blocks".
//
// A block is a span of tokens of one group of layers. Its tokens lie in tiles of as many tokens as the
// block has lanes: lane i of a tile owns token i. A tile codes one step for the tokens' classes, then one
// step per component. A lane follows how active its token is (a running mean of magnitudes) and compares it
// with what the component's neighbours lead one to expect: that ratio picks one of six tables.
#ifndef KV_KLT_H
#define KV_KLT_H

#include "quantize.h"
#include "rangecoder.h"

#define KV_KLT_CONTEXTS 6
#define KV_KLT_CLASSES 8     // a token's step is the level's step / 2^(class - KV_KLT_NEUTRAL_CLASS)
#define KV_KLT_NEUTRAL_CLASS 2
#define KV_KLT_MAGNITUDE_CAP 15
#define KV_KLT_ACTIVITY_BITS 12  // fraction bits of the running mean
#define KV_KLT_ACTIVITY_SHIFT 4  // the running mean forgets 1/16 with each component

// One component of a group at one level. The same 32 bytes as COMPONENT_DTYPE in codec/klt_plan.py.
struct kv_klt_component {
  uint32_t first_table;  // of KV_KLT_CONTEXTS tables with the same values
  int32_t low;           // value of index 0 of those tables
  uint32_t escape;       // index of their escape
  int32_t threshold[KV_KLT_CONTEXTS - 1];  // of the activity, ascending
};
static_assert(sizeof(kv_klt_component) == 32, "shared with NumPy");

// One group at one level. The same 32 bytes as GROUP_DTYPE in codec/klt_plan.py.
struct kv_klt_group {
  uint32_t first_component;  // among the level's components
  uint32_t num_components;   // may be 0: such a group's blocks are empty
  uint32_t class_table;      // values 0..7; its escape never occurs
  int32_t start_activity;    // of a token of the neutral class
  uint64_t coefficients;     // place of its coefficients [component][token] among the chunk's
  uint64_t reserved;
};
static_assert(sizeof(kv_klt_group) == 32, "shared with NumPy");

KV_FN uint32_t kv_klt_context(const kv_klt_component* component, int32_t activity) {
  uint32_t context = 0;
  for (uint32_t i = 0; i < KV_KLT_CONTEXTS - 1; ++i)
    context += activity > component->threshold[i] ? 1u : 0u;
  return context;
}

KV_FN int32_t kv_klt_start_activity(int32_t neutral, uint32_t token_class) {
  return (neutral << token_class) >> KV_KLT_NEUTRAL_CLASS;
}

KV_FN int32_t kv_klt_next_activity(int32_t activity, int32_t value) {
  int32_t magnitude = value < 0 ? -value : value;
  magnitude = magnitude > KV_KLT_MAGNITUDE_CAP ? KV_KLT_MAGNITUDE_CAP : magnitude;
  return activity + (((magnitude << KV_KLT_ACTIVITY_BITS) - activity) >> KV_KLT_ACTIVITY_SHIFT);
}

// 2^-(class - neutral), exactly.
KV_FN float kv_klt_class_scale(uint32_t token_class) {
  return kv_float_of_bits((127u + KV_KLT_NEUTRAL_CLASS - token_class) << 23);
}

// Symbols of a level are thirds, to the nearest, of those of the level that refines it: its cells nest in
// theirs, so that symbol = 3 * coarser symbol + (-1, 0 or 1).
KV_FN int32_t kv_klt_third(int32_t symbol) {
  return symbol >= 0 ? (symbol + 1) / 3 : -((1 - symbol) / 3);
}

// Symbol at the finest step of a chain, for those that are thirds of it. 2^22 bounds what kv_round rounds.
KV_FN int32_t kv_klt_finest(float value, float inverse_step) {
  return (int32_t)kv_round(kv_clamp(value * inverse_step, 4194303.0f));
}

KV_FN int16_t kv_klt_symbol(int32_t symbol) {
  return (int16_t)(symbol > 32767 ? 32767 : symbol < -32767 ? -32767 : symbol);
}

// How a table's distribution splits among the three values that refine a coarser symbol: of 4096 slots, -1 has
// those below `first`, 0 those below `second`, 1 the others. The same 4 bytes as SPLIT_DTYPE in klt_native.py.
struct kv_klt_split {
  uint16_t first, second;
};
#define KV_KLT_SPLIT_LIMIT 3
#define KV_KLT_SPLITS (2 * KV_KLT_SPLIT_LIMIT + 1)  // per table: of coarser symbols -3 or less to 3 or more

KV_FN uint32_t kv_klt_split_place(uint32_t table, int32_t coarse) {
  coarse = coarse > KV_KLT_SPLIT_LIMIT ? KV_KLT_SPLIT_LIMIT : coarse;
  coarse = coarse < -KV_KLT_SPLIT_LIMIT ? -KV_KLT_SPLIT_LIMIT : coarse;
  return table * KV_KLT_SPLITS + (uint32_t)(coarse + KV_KLT_SPLIT_LIMIT);
}

// Which third of the coarser symbol's cell a symbol is: -1, 0 or 1. Saturated symbols may not nest.
KV_FN int32_t kv_klt_rest(int32_t symbol, int32_t coarse) {
  const int32_t rest = symbol - 3 * coarse;
  return rest > 1 ? 1 : rest < -1 ? -1 : rest;
}

// Lanes of a block: all 32 unless it has fewer tokens; a power of two.
KV_FN uint32_t kv_klt_num_lanes(uint32_t num_tokens) {
  uint32_t lanes = 1;
  while (lanes < KV_MAX_LANES && lanes * 2u <= num_tokens) lanes *= 2u;
  return lanes;
}

#if !defined(__CUDACC__)
// ---- one CPU thread, all lanes of a block -----------------------------------------------------------

// Decodes one step in which every lane has its own table; `first_slot` is a lane's table * 4096.
static void kv_klt_decode_step(kv_decoder* coder, const uint32_t* entries, const uint32_t* first_slot,
                               uint32_t escape, int32_t low, int32_t* values, uint32_t active) {
  uint32_t any_escape = 0;
  if (active == KV_MAX_LANES && coder->end - coder->next >= KV_MAX_LANES) {
    const uint16_t* next = coder->next;
    for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane) {
      uint32_t state = coder->state[lane];
      uint32_t entry = entries[first_slot[lane] + kv_slot(state)];
      state = kv_decode_advance(state, entry);
      uint32_t place = kv_entry_index(entry);
      any_escape |= place == escape;
      values[lane] = low + (int32_t)place;
      uint32_t takes = kv_needs_word(state);
      uint32_t longer = kv_take_word(state, *next);
      coder->state[lane] = takes ? longer : state;
      next += takes;
    }
    coder->next = next;
  } else {
    for (uint32_t lane = 0; lane < active; ++lane) {
      uint32_t state = coder->state[lane];
      uint32_t entry = entries[first_slot[lane] + kv_slot(state)];
      state = kv_decode_advance(state, entry);
      uint32_t place = kv_entry_index(entry);
      any_escape |= place == escape;
      values[lane] = low + (int32_t)place;
      if (kv_needs_word(state)) state = kv_take_word(state, kv_next_word(coder));
      coder->state[lane] = state;
    }
  }
  if (!any_escape) return;
  for (uint32_t lane = 0; lane < active; ++lane) {
    if (values[lane] != low + (int32_t)escape) continue;
    uint32_t state = coder->state[lane];
    values[lane] = (int32_t)(int16_t)(state & 0xffffu);
    coder->state[lane] = kv_take_word(state >> 16, kv_next_word(coder));
  }
}

// Decodes one component's step for a tile: each lane's activity chooses its table.
static inline void kv_klt_decode_component(kv_decoder* coder, const kv_klt_component* component,
                                           const uint32_t* entries, int32_t* values,
                                           const int32_t* activity, uint32_t active) {
  uint32_t first_slot[KV_MAX_LANES];
  for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane)
    first_slot[lane] =
        (component->first_table + kv_klt_context(component, activity[lane])) * KV_PROB_SCALE;
  kv_klt_decode_step(coder, entries, first_slot, component->escape, component->low, values, active);
}

// Where decoded symbols go: to dequantized coefficients [component][stride] from the block's first token on.
struct kv_klt_to_coefficients {
  float step;
  float* out;
  uint64_t stride;
  float scale[KV_MAX_LANES];

  void start_tile(uint32_t, const int32_t* classes, uint32_t) {
    for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane)
      scale[lane] = step * kv_klt_class_scale((uint32_t)classes[lane]);
  }
  void put(uint32_t component, uint32_t first, const int32_t* values, uint32_t active) {
    float* row = out + component * stride + first;
    for (uint32_t lane = 0; lane < active; ++lane) row[lane] = (float)values[lane] * scale[lane];
  }
};

// Or as they are, to be refined: symbols [component][stride] and classes [token].
struct kv_klt_to_symbols {
  int32_t* out;
  uint8_t* classes_out;
  uint64_t stride;

  void start_tile(uint32_t first, const int32_t* classes, uint32_t active) {
    for (uint32_t lane = 0; lane < active; ++lane) classes_out[first + lane] = (uint8_t)classes[lane];
  }
  void put(uint32_t component, uint32_t first, const int32_t* values, uint32_t active) {
    int32_t* row = out + component * stride + first;
    for (uint32_t lane = 0; lane < active; ++lane) row[lane] = values[lane];
  }
};

// Decodes a block; `sink` is one of the two above.
template <class Sink>
static int kv_klt_decode_block(const kv_klt_group* group, const kv_klt_component* components,
                               const kv_table* tables, const uint32_t* entries, const uint16_t* block,
                               uint64_t num_words, uint32_t num_tokens, Sink* sink) {
  if (group->num_components == 0) return num_words == 0 ? KV_OK : KV_TRAILING;
  const uint32_t num_lanes = kv_klt_num_lanes(num_tokens);
  kv_decoder coder;
  int status = kv_decoder_start(&coder, num_lanes, block, num_words);
  if (status != KV_OK) return status;
  components += group->first_component;
  const kv_table* class_table = &tables[group->class_table];
  for (uint32_t first = 0; first < num_tokens; first += num_lanes) {
    const uint32_t left = num_tokens - first, active = left < num_lanes ? left : num_lanes;
    uint32_t first_slot[KV_MAX_LANES];
    int32_t values[KV_MAX_LANES] = {0}, activity[KV_MAX_LANES];
    for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane)
      first_slot[lane] = group->class_table * KV_PROB_SCALE;
    kv_klt_decode_step(&coder, entries, first_slot, class_table->num_symbols - 1u, class_table->low,
                       values, active);
    for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane) {
      if ((uint32_t)values[lane] >= KV_KLT_CLASSES) return KV_BAD_CLASS;
      activity[lane] = kv_klt_start_activity(group->start_activity, (uint32_t)values[lane]);
    }
    sink->start_tile(first, values, active);
    for (uint32_t c = 0; c < group->num_components; ++c) {
      kv_klt_decode_component(&coder, &components[c], entries, values, activity, active);
      if (active == KV_MAX_LANES) {  // a constant count lets the compiler use vectors
        sink->put(c, first, values, KV_MAX_LANES);
        for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane)
          activity[lane] = kv_klt_next_activity(activity[lane], values[lane]);
      } else {
        sink->put(c, first, values, active);
        for (uint32_t lane = 0; lane < active; ++lane)
          activity[lane] = kv_klt_next_activity(activity[lane], values[lane]);
      }
    }
  }
  return kv_decoder_finish(&coder);
}

// Encodes one step, last lane first; escapes first, because rANS is a stack.
static void kv_klt_encode_step(kv_encoder* coder, const kv_encode_symbol* symbols,
                               const kv_table* tables, const uint16_t* table_of, const int16_t* values,
                               uint32_t active) {
  for (uint32_t lane = active; lane-- > 0;) {
    const kv_table* table = &tables[table_of[lane]];
    if ((uint32_t)(values[lane] - table->low) < table->num_symbols - 1u) continue;
    uint32_t state = coder->state[lane];
    *--coder->next = (uint16_t)state;
    coder->state[lane] = ((state >> 16) << 16) | ((uint32_t)values[lane] & 0xffffu);
  }
  for (uint32_t lane = active; lane-- > 0;) {
    const kv_table* table = &tables[table_of[lane]];
    uint32_t place = (uint32_t)(values[lane] - table->low), escape = table->num_symbols - 1u;
    const kv_encode_symbol* entry = &symbols[table->first + (place < escape ? place : escape)];
    uint32_t state = coder->state[lane];
    if (state >= entry->limit) {
      *--coder->next = (uint16_t)state;
      state >>= 16;
    }
    coder->state[lane] =
        kv_encode_advance(state, entry->reciprocal, entry->frequency, entry->cumulative);
  }
}

// Encodes a block of symbols [component][stride] and classes [token]. `table_of` is room for
// num_components * 32 numbers. Returns the block's first word; it ends where the space ends.
static uint16_t* kv_klt_encode_block(const kv_klt_group* group, const kv_klt_component* components,
                                     const kv_table* tables, const kv_encode_symbol* symbols,
                                     const int16_t* values, uint64_t stride, const uint8_t* classes,
                                     uint32_t num_tokens, uint16_t* table_of, uint16_t* space,
                                     uint64_t space_words) {
  if (group->num_components == 0) return space + space_words;
  const uint32_t num_lanes = kv_klt_num_lanes(num_tokens);
  kv_encoder coder;
  kv_encoder_start(&coder, num_lanes, space, space_words);
  components += group->first_component;
  for (uint32_t tile = (num_tokens + num_lanes - 1u) / num_lanes; tile-- > 0;) {
    const uint32_t first = tile * num_lanes, left = num_tokens - first;
    const uint32_t active = left < num_lanes ? left : num_lanes;
    int32_t activity[KV_MAX_LANES];
    for (uint32_t lane = 0; lane < active; ++lane)
      activity[lane] = kv_klt_start_activity(group->start_activity, classes[first + lane]);
    for (uint32_t c = 0; c < group->num_components; ++c) {
      const int16_t* row = values + c * stride + first;
      for (uint32_t lane = 0; lane < active; ++lane) {
        table_of[c * KV_MAX_LANES + lane] =
            (uint16_t)(components[c].first_table + kv_klt_context(&components[c], activity[lane]));
        activity[lane] = kv_klt_next_activity(activity[lane], row[lane]);
      }
    }
    for (uint32_t c = group->num_components; c-- > 0;)
      kv_klt_encode_step(&coder, symbols, tables, table_of + c * KV_MAX_LANES,
                         values + c * stride + first, active);
    uint16_t class_tables[KV_MAX_LANES];
    int16_t class_values[KV_MAX_LANES];
    for (uint32_t lane = 0; lane < active; ++lane) {
      class_tables[lane] = (uint16_t)group->class_table;
      class_values[lane] = (int16_t)classes[first + lane];
    }
    kv_klt_encode_step(&coder, symbols, tables, class_tables, class_values, active);
  }
  return kv_encoder_finish(&coder);
}

// ---- refinements ------------------------------------------------------------------------------------
// A block like a level's, without the step for classes, which are the coarser level's. The first components
// are those that the coarser level codes too: of them, each symbol says which third of the coarser one's cell
// it is. The others are coded as their level codes them. The lanes' activity is that of the finer symbols.

static uint16_t* kv_klt_encode_refinement_block(
    const kv_klt_group* group, uint32_t num_coarse, const kv_klt_component* components,
    const kv_table* tables, const kv_encode_symbol* symbols, const kv_klt_split* splits,
    const int16_t* values, const int16_t* coarse, uint64_t stride, const uint8_t* classes,
    uint32_t num_tokens, uint16_t* table_of, uint16_t* space, uint64_t space_words) {
  if (group->num_components == 0) return space + space_words;
  const uint32_t num_lanes = kv_klt_num_lanes(num_tokens);
  kv_encoder coder;
  kv_encoder_start(&coder, num_lanes, space, space_words);
  components += group->first_component;
  for (uint32_t tile = (num_tokens + num_lanes - 1u) / num_lanes; tile-- > 0;) {
    const uint32_t first = tile * num_lanes, left = num_tokens - first;
    const uint32_t active = left < num_lanes ? left : num_lanes;
    int32_t activity[KV_MAX_LANES];
    for (uint32_t lane = 0; lane < active; ++lane)
      activity[lane] = kv_klt_start_activity(group->start_activity, classes[first + lane]);
    for (uint32_t c = 0; c < group->num_components; ++c) {
      const int16_t* row = values + c * stride + first;
      const int16_t* below = c < num_coarse ? coarse + c * stride + first : 0;
      for (uint32_t lane = 0; lane < active; ++lane) {
        table_of[c * KV_MAX_LANES + lane] =
            (uint16_t)(components[c].first_table + kv_klt_context(&components[c], activity[lane]));
        const int32_t value = below ? 3 * below[lane] + kv_klt_rest(row[lane], below[lane]) : row[lane];
        activity[lane] = kv_klt_next_activity(activity[lane], value);
      }
    }
    for (uint32_t c = group->num_components; c-- > 0;) {
      const int16_t* row = values + c * stride + first;
      const uint16_t* tables_of = table_of + c * KV_MAX_LANES;
      if (c >= num_coarse) {
        kv_klt_encode_step(&coder, symbols, tables, tables_of, row, active);
        continue;
      }
      const int16_t* below = coarse + c * stride + first;
      for (uint32_t lane = active; lane-- > 0;) {
        const kv_klt_split split = splits[kv_klt_split_place(tables_of[lane], below[lane])];
        const int32_t rest = kv_klt_rest(row[lane], below[lane]);
        const uint32_t low = rest < 0 ? 0u : rest == 0 ? split.first : split.second;
        const uint32_t high = rest < 0 ? split.first : rest == 0 ? split.second : KV_PROB_SCALE;
        uint32_t state = coder.state[lane];
        if (state >= (high - low) << 20) {
          *--coder.next = (uint16_t)state;
          state >>= 16;
        }
        coder.state[lane] =
            (state / (high - low)) * KV_PROB_SCALE + state % (high - low) + low;
      }
    }
  }
  return kv_encoder_finish(&coder);
}

static int kv_klt_decode_refinement_block(const kv_klt_group* group, uint32_t num_coarse,
                                          const kv_klt_component* components, const uint32_t* entries,
                                          const kv_klt_split* splits, const uint16_t* block,
                                          uint64_t num_words, const int32_t* coarse,
                                          const uint8_t* classes, uint32_t num_tokens, int32_t* out,
                                          uint64_t stride) {
  if (group->num_components == 0) return num_words == 0 ? KV_OK : KV_TRAILING;
  const uint32_t num_lanes = kv_klt_num_lanes(num_tokens);
  kv_decoder coder;
  int status = kv_decoder_start(&coder, num_lanes, block, num_words);
  if (status != KV_OK) return status;
  components += group->first_component;
  for (uint32_t first = 0; first < num_tokens; first += num_lanes) {
    const uint32_t left = num_tokens - first, active = left < num_lanes ? left : num_lanes;
    int32_t values[KV_MAX_LANES] = {0}, activity[KV_MAX_LANES] = {0};
    for (uint32_t lane = 0; lane < active; ++lane)
      activity[lane] = kv_klt_start_activity(group->start_activity, classes[first + lane]);
    for (uint32_t c = 0; c < group->num_components; ++c) {
      const kv_klt_component* component = &components[c];
      if (c >= num_coarse) {
        kv_klt_decode_component(&coder, component, entries, values, activity, active);
      } else {
        const int32_t* below = coarse + c * stride + first;
        for (uint32_t lane = 0; lane < active; ++lane) {
          const uint32_t table = component->first_table + kv_klt_context(component, activity[lane]);
          const kv_klt_split split = splits[kv_klt_split_place(table, below[lane])];
          uint32_t state = coder.state[lane];
          const uint32_t slot = kv_slot(state);
          const int32_t rest = (int32_t)(slot >= split.first) + (int32_t)(slot >= split.second) - 1;
          const uint32_t low = rest < 0 ? 0u : rest == 0 ? split.first : split.second;
          const uint32_t high = rest < 0 ? split.first : rest == 0 ? split.second : KV_PROB_SCALE;
          state = (high - low) * (state >> KV_PROB_BITS) + slot - low;
          if (kv_needs_word(state)) state = kv_take_word(state, kv_next_word(&coder));
          coder.state[lane] = state;
          values[lane] = 3 * below[lane] + rest;
        }
      }
      int32_t* row = out + c * stride + first;
      for (uint32_t lane = 0; lane < active; ++lane) {
        row[lane] = values[lane];
        activity[lane] = kv_klt_next_activity(activity[lane], values[lane]);
      }
    }
  }
  return kv_decoder_finish(&coder);
}
#endif  // !__CUDACC__

#endif

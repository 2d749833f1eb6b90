// The entropy coder: range asymmetric numeral systems (rANS) with 12-bit frequencies, a 32-bit state and
// renormalization by 16-bit words, in up to 32 interleaved lanes. Integers only: every machine gives the
// same bytes. Derivation: docs/bitstream.md, "The coder"; choice: docs/adr/0003-range-coder-and-tables.md.
// Source: J. Duda, arXiv:1311.2540; interleaving: F. Giesen, arXiv:1402.3392.
//
// Invariant between symbols: KV_STATE_LOW <= state < 2^32 in every lane.
//
// A block is a list of steps. In a step each of the lanes 0..n-1 codes one symbol; then those lanes whose
// symbol was an escape code 16 raw bits, in lane order. A lane that needs a word takes the next one of the
// block, lower lanes first. So one warp decodes a block with a ballot per step, and a CPU decodes it with
// one loop over lanes, or with vectors.
#ifndef KV_RANGECODER_H
#define KV_RANGECODER_H

#include "portable.h"

#define KV_PROB_BITS 12
#define KV_PROB_SCALE (1u << KV_PROB_BITS)
#define KV_STATE_LOW (1u << 16)
#define KV_MAX_LANES 32
#define KV_MAX_SYMBOLS 256  // per table, the escape included: an index is a byte
#define KV_RECIPROCAL_BITS 44

// One symbol of a table, for the encoder. The same 16 bytes as ENCODE_DTYPE in codec/tables.py.
struct kv_encode_symbol {
  uint64_t reciprocal;  // ceil(2^44 / frequency)
  uint16_t frequency;   // 1..4095: the escape always keeps at least 1
  uint16_t cumulative;  // sum of the frequencies before it
  uint32_t limit;       // frequency << 20: at this state or above, a word goes out first
};
static_assert(sizeof(kv_encode_symbol) == 16, "shared with NumPy");

// One table, for both directions. The same 12 bytes as TABLE_DTYPE in codec/tables.py.
struct kv_table {
  int32_t low;           // value of index 0
  uint32_t first;        // its place among the encode symbols
  uint32_t num_symbols;  // 2..256; the last index is the escape
};
static_assert(sizeof(kv_table) == 12, "shared with NumPy");

// A run: consecutive symbols that share a table. The same 12 bytes as RUN_DTYPE in codec/entropy.py.
// Each run starts at lane 0 of a new step, so that all lanes of a step share the table.
struct kv_run {
  uint32_t table;
  int32_t shift;    // value = low + index + shift, and an escape's payload is value - shift
  uint32_t length;  // symbols
};
static_assert(sizeof(kv_run) == 12, "shared with NumPy");

// Decode entries, one per slot of a table: offset in slot << 20 | frequency << 8 | index.
KV_FN uint32_t kv_entry_index(uint32_t entry) { return entry & 0xffu; }

KV_FN uint32_t kv_decode_advance(uint32_t state, uint32_t entry) {
  return ((entry >> 8) & 0xfffu) * (state >> KV_PROB_BITS) + (entry >> 20);
}

KV_FN uint32_t kv_slot(uint32_t state) { return state & (KV_PROB_SCALE - 1u); }

KV_FN uint32_t kv_needs_word(uint32_t state) { return state < KV_STATE_LOW; }

KV_FN uint32_t kv_take_word(uint32_t state, uint32_t word) { return (state << 16) | word; }

// The encoder's step, after a word went out if state >= limit. Exact: state < frequency << 20 and
// frequency < 2^12 keep state * (reciprocal * frequency - 2^44) below 2^44, and the product below 2^64.
KV_FN uint32_t kv_encode_advance(uint32_t state, uint64_t reciprocal, uint32_t frequency,
                                 uint32_t cumulative) {
  uint32_t quotient = (uint32_t)((state * reciprocal) >> KV_RECIPROCAL_BITS);
  return state + cumulative + quotient * (KV_PROB_SCALE - frequency);
}

// How many lanes a block gets whose longest run has that many symbols: a flushed lane costs about three
// bytes, so short runs use few. A power of two.
KV_FN uint32_t kv_num_lanes(uint32_t longest_run) {
  uint32_t lanes = 1;
  while (lanes < KV_MAX_LANES && lanes * 16u <= longest_run) lanes *= 2u;
  return lanes;
}

// Bound on the words of a step: one per symbol, one per escape.
KV_FN uint64_t kv_max_block_bytes(uint64_t num_symbols, uint32_t num_lanes) {
  return 4ull * num_lanes + 4ull * num_symbols;
}

#if !defined(__CUDACC__)
// ---- one CPU thread, all lanes of a block -----------------------------------------------------------

struct kv_encoder {
  uint32_t state[KV_MAX_LANES];
  uint32_t num_lanes;
  uint16_t* begin;  // of the space; words go from its end towards its beginning
  uint16_t* next;   // words written so far are [next, end)
};

// `space` must hold kv_max_block_bytes(...); the caller checks.
KV_FN void kv_encoder_start(kv_encoder* coder, uint32_t num_lanes, uint16_t* space,
                            uint64_t space_words) {
  for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane) coder->state[lane] = KV_STATE_LOW;
  coder->num_lanes = num_lanes;
  coder->begin = space;
  coder->next = space + space_words;
}

// Encodes a run, last step first. Runs are encoded last to first, because rANS is a stack.
static void kv_encode_run(kv_encoder* coder, const kv_encode_symbol* symbols, const kv_table* table,
                          int32_t shift, const int16_t* values, uint32_t length) {
  const kv_encode_symbol* entries = symbols + table->first;
  const uint32_t num_lanes = coder->num_lanes;
  const uint32_t escape = table->num_symbols - 1u;
  const int32_t low = table->low + shift;
  uint16_t* next = coder->next;
  uint32_t num_steps = (length + num_lanes - 1u) / num_lanes;
  for (uint32_t step = num_steps; step-- > 0;) {
    const int16_t* step_values = values + step * num_lanes;
    uint32_t active = length - step * num_lanes;
    if (active > num_lanes) active = num_lanes;
    uint8_t index[KV_MAX_LANES];
    uint32_t any_escape = 0;
    for (uint32_t lane = 0; lane < active; ++lane) {
      uint32_t place = (uint32_t)(step_values[lane] - low);  // negative becomes large
      uint32_t is_escape = place >= escape;
      any_escape |= is_escape;
      index[lane] = (uint8_t)(is_escape ? escape : place);
    }
    if (any_escape) {
      for (uint32_t lane = active; lane-- > 0;) {
        if (index[lane] != escape) continue;
        uint32_t state = coder->state[lane];
        *--next = (uint16_t)state;  // 16 raw bits always push 16 bits out
        uint32_t raw = (uint32_t)(step_values[lane] - shift) & 0xffffu;
        coder->state[lane] = ((state >> 16) << 16) | raw;
      }
    }
    for (uint32_t lane = active; lane-- > 0;) {
      const kv_encode_symbol* entry = entries + index[lane];
      uint32_t state = coder->state[lane];
      uint32_t full = state >= entry->limit;
      next[-1] = (uint16_t)state;  // overwritten unless it is kept; inside the bound either way
      next -= full;
      state = full ? state >> 16 : state;
      coder->state[lane] =
          kv_encode_advance(state, entry->reciprocal, entry->frequency, entry->cumulative);
    }
  }
  coder->next = next;
}

// Writes the lanes' states in front of the words; returns the block's first byte.
KV_FN uint16_t* kv_encoder_finish(kv_encoder* coder) {
  for (uint32_t lane = coder->num_lanes; lane-- > 0;) {
    *--coder->next = (uint16_t)(coder->state[lane] >> 16);
    *--coder->next = (uint16_t)coder->state[lane];
  }
  return coder->next;
}

struct kv_decoder {
  uint32_t state[KV_MAX_LANES];
  uint32_t num_lanes;
  const uint16_t* next;
  const uint16_t* end;
  uint32_t missing;  // not zero once words were asked for that are not there
};

KV_FN int kv_decoder_start(kv_decoder* coder, uint32_t num_lanes, const uint16_t* block,
                           uint64_t num_words) {
  coder->num_lanes = num_lanes;
  coder->missing = 0;
  if (num_words < 2ull * num_lanes) return KV_TRUNCATED;
  for (uint32_t lane = 0; lane < num_lanes; ++lane)
    coder->state[lane] = (uint32_t)block[2 * lane] | ((uint32_t)block[2 * lane + 1] << 16);
  coder->next = block + 2 * num_lanes;
  coder->end = block + num_words;
  return KV_OK;
}

// Takes a word if there is one; else remembers that one was missing.
KV_FN uint32_t kv_next_word(kv_decoder* coder) {
  if (coder->next == coder->end) {
    coder->missing = 1;
    return 0;
  }
  return *coder->next++;
}

KV_FN void kv_decode_escapes(kv_decoder* coder, const uint8_t* index, uint32_t escape, int32_t shift,
                             int16_t* values, uint32_t active) {
  for (uint32_t lane = 0; lane < active; ++lane) {
    if (index[lane] != escape) continue;
    uint32_t state = coder->state[lane];
    values[lane] = (int16_t)((int32_t)(int16_t)(state & 0xffffu) + shift);
    coder->state[lane] = kv_take_word(state >> 16, kv_next_word(coder));
  }
}

// Decodes one step with a check before every word.
KV_FN void kv_decode_step_checked(kv_decoder* coder, const uint32_t* entries, uint32_t escape,
                                  int32_t low, int32_t shift, int16_t* values, uint32_t active) {
  uint8_t index[KV_MAX_LANES];
  for (uint32_t lane = 0; lane < active; ++lane) {
    uint32_t state = coder->state[lane];
    uint32_t entry = entries[kv_slot(state)];
    state = kv_decode_advance(state, entry);
    index[lane] = (uint8_t)kv_entry_index(entry);
    values[lane] = (int16_t)(low + (int32_t)kv_entry_index(entry));
    if (kv_needs_word(state)) state = kv_take_word(state, kv_next_word(coder));
    coder->state[lane] = state;
  }
  kv_decode_escapes(coder, index, escape, shift, values, active);
}

// Decodes a run. `entries` are the table's 4096 decode entries.
static void kv_decode_run(kv_decoder* coder, const uint32_t* entries, const kv_table* table,
                          int32_t shift, int16_t* values, uint32_t length) {
  const uint32_t escape = table->num_symbols - 1u;
  const int32_t low = table->low + shift;
  const uint32_t num_lanes = coder->num_lanes;
  uint32_t done = 0;
  if (num_lanes == KV_MAX_LANES) {
    // Whole steps without a check per word: at most one word per lane, escapes check their own.
    while (length - done >= KV_MAX_LANES && coder->end - coder->next >= KV_MAX_LANES) {
      uint8_t index[KV_MAX_LANES];
      const uint16_t* next = coder->next;
      uint32_t any_escape = 0;
      for (uint32_t lane = 0; lane < KV_MAX_LANES; ++lane) {
        uint32_t state = coder->state[lane];
        uint32_t entry = entries[kv_slot(state)];
        state = kv_decode_advance(state, entry);
        uint32_t place = kv_entry_index(entry);
        index[lane] = (uint8_t)place;
        any_escape |= place == escape;
        values[done + lane] = (int16_t)(low + (int32_t)place);
        uint32_t takes = kv_needs_word(state);
        uint32_t longer = kv_take_word(state, *next);
        coder->state[lane] = takes ? longer : state;
        next += takes;
      }
      coder->next = next;
      if (any_escape)
        kv_decode_escapes(coder, index, escape, shift, values + done, KV_MAX_LANES);
      done += KV_MAX_LANES;
    }
  }
  while (done < length) {
    uint32_t active = length - done;
    if (active > num_lanes) active = num_lanes;
    kv_decode_step_checked(coder, entries, escape, low, shift, values + done, active);
    done += active;
  }
}

// Every lane must be back where the encoder started, with no word left: damage rarely survives this.
KV_FN int kv_decoder_finish(const kv_decoder* coder) {
  if (coder->missing) return KV_TRUNCATED;
  if (coder->next != coder->end) return KV_TRAILING;
  for (uint32_t lane = 0; lane < coder->num_lanes; ++lane)
    if (coder->state[lane] != KV_STATE_LOW) return KV_WRONG_STATE;
  return KV_OK;
}
#endif  // !__CUDACC__

#endif

// Level set klt on the CPU: loops over blocks and threads, and the passes over whole rows before and after
// the matrix products. Included by entry_cpu.cpp, after what all level sets share.

// A chunk at one level. The same fields as KltShape in codec/klt_native.py.
struct kv_klt_chunk {
  const kv_klt_group* groups;
  const kv_klt_component* components;
  int64_t num_groups;
  int64_t num_tokens;
  int64_t block_tokens;
  int64_t num_threads;
};

namespace {

struct KltBlock {
  int64_t group, first, tokens;
};

// Block = group * spans + span.
KltBlock klt_locate(const kv_klt_chunk* chunk, int64_t index) {
  int64_t spans = (chunk->num_tokens + chunk->block_tokens - 1) / chunk->block_tokens;
  KltBlock block;
  block.group = index / spans;
  block.first = index % spans * chunk->block_tokens;
  int64_t left = chunk->num_tokens - block.first;
  block.tokens = left < chunk->block_tokens ? left : chunk->block_tokens;
  return block;
}

int64_t klt_num_blocks(const kv_klt_chunk* chunk) {
  return chunk->num_groups * ((chunk->num_tokens + chunk->block_tokens - 1) / chunk->block_tokens);
}

// One block's words.
struct KltCoded {
  int64_t index;  // of the group
  const kv_klt_group* group;
  int64_t first;
  uint32_t tokens;
  const uint16_t* words;
  uint64_t num_words;
};

// Runs `decode` over a chunk's blocks; it returns a status.
template <class Decode>
int klt_decode_blocks(const kv_klt_chunk* chunk, const uint8_t* payload, const uint32_t* offsets,
                      int32_t* status, const Decode& decode) {
  return for_each_block<NoScratch>(
      klt_num_blocks(chunk), (int)chunk->num_threads, 0, [&](int64_t index, NoScratch&) {
        KltBlock block = klt_locate(chunk, index);
        const uint32_t size = offsets[index + 1] - offsets[index];
        KltCoded coded = {block.group,
                          &chunk->groups[block.group],
                          block.first,
                          (uint32_t)block.tokens,
                          (const uint16_t*)(payload + offsets[index]),
                          size / 2};
        status[index] = size % 2 ? KV_TRAILING : decode(coded);
      });
}

struct TableScratch {
  explicit TableScratch(size_t items) : table_of(items) {}
  std::vector<uint16_t> table_of;
};

}  // namespace

// Encodes symbols [group][component][token] and classes [group][token]. Block i's space is
// output[i * space_bytes ...); its sizes[i] bytes end where it ends.
KV_EXPORT int kv_klt_encode(const kv_klt_chunk* chunk, const kv_tables* tables, const int16_t* symbols,
                            const uint8_t* classes, uint8_t* output, uint64_t space_bytes,
                            uint32_t* sizes) {
  uint32_t most = 0;
  for (int64_t g = 0; g < chunk->num_groups; ++g)
    most = chunk->groups[g].num_components > most ? chunk->groups[g].num_components : most;
  return for_each_block<TableScratch>(
      klt_num_blocks(chunk), (int)chunk->num_threads, (size_t)most * KV_MAX_LANES,
      [&](int64_t index, TableScratch& scratch) {
        KltBlock block = klt_locate(chunk, index);
        const kv_klt_group* group = &chunk->groups[block.group];
        uint16_t* space = (uint16_t*)(output + index * space_bytes);
        uint16_t* begin = kv_klt_encode_block(
            group, chunk->components, tables->tables, tables->symbols,
            symbols + group->coefficients + block.first, (uint64_t)chunk->num_tokens,
            classes + block.group * chunk->num_tokens + block.first, (uint32_t)block.tokens,
            scratch.table_of.data(), space, space_bytes / 2);
        sizes[index] = (uint32_t)((uint8_t*)(space + space_bytes / 2) - (uint8_t*)begin);
      });
}

// Decodes into float32 coefficients [group][component][token].
KV_EXPORT int kv_klt_decode(const kv_klt_chunk* chunk, const kv_tables* tables, const uint8_t* payload,
                            const uint32_t* offsets, const float* step, float* coefficients,
                            int32_t* status) {
  return klt_decode_blocks(chunk, payload, offsets, status, [&](const KltCoded& coded) {
    kv_klt_to_coefficients sink = {*step, coefficients + coded.group->coefficients + coded.first,
                                   (uint64_t)chunk->num_tokens, {}};
    return kv_klt_decode_block(coded.group, chunk->components, tables->tables, tables->entries,
                               coded.words, coded.num_words, coded.tokens, &sink);
  });
}

// Decodes into symbols [group][component][token] and classes [group][token].
KV_EXPORT int kv_klt_decode_symbols(const kv_klt_chunk* chunk, const kv_tables* tables,
                                    const uint8_t* payload, const uint32_t* offsets, int32_t* symbols,
                                    uint8_t* classes, int32_t* status) {
  return klt_decode_blocks(chunk, payload, offsets, status, [&](const KltCoded& coded) {
    kv_klt_to_symbols sink = {symbols + coded.group->coefficients + coded.first,
                              classes + coded.index * chunk->num_tokens + coded.first,
                              (uint64_t)chunk->num_tokens};
    return kv_klt_decode_block(coded.group, chunk->components, tables->tables, tables->entries,
                               coded.words, coded.num_words, coded.tokens, &sink);
  });
}

// What refines coarser symbols to symbols, both [group][component][token]; `coarse` are the coarser level's
// groups. Spaces and sizes as in kv_klt_encode.
KV_EXPORT int kv_klt_encode_refinement(const kv_klt_chunk* chunk, const kv_klt_group* coarse,
                                       const kv_tables* tables, const kv_klt_split* splits,
                                       const int16_t* symbols, const int16_t* coarse_symbols,
                                       const uint8_t* classes, uint8_t* output, uint64_t space_bytes,
                                       uint32_t* sizes) {
  uint32_t most = 0;
  for (int64_t g = 0; g < chunk->num_groups; ++g)
    most = chunk->groups[g].num_components > most ? chunk->groups[g].num_components : most;
  return for_each_block<TableScratch>(
      klt_num_blocks(chunk), (int)chunk->num_threads, (size_t)most * KV_MAX_LANES,
      [&](int64_t index, TableScratch& scratch) {
        KltBlock block = klt_locate(chunk, index);
        const kv_klt_group* group = &chunk->groups[block.group];
        const kv_klt_group* below = &coarse[block.group];
        uint16_t* space = (uint16_t*)(output + index * space_bytes);
        uint16_t* begin = kv_klt_encode_refinement_block(
            group, below->num_components, chunk->components, tables->tables, tables->symbols, splits,
            symbols + group->coefficients + block.first,
            coarse_symbols + below->coefficients + block.first, (uint64_t)chunk->num_tokens,
            classes + block.group * chunk->num_tokens + block.first, (uint32_t)block.tokens,
            scratch.table_of.data(), space, space_bytes / 2);
        sizes[index] = (uint32_t)((uint8_t*)(space + space_bytes / 2) - (uint8_t*)begin);
      });
}

// Refines coarser symbols to symbols, both [group][component][token].
KV_EXPORT int kv_klt_decode_refinement(const kv_klt_chunk* chunk, const kv_klt_group* coarse,
                                       const kv_tables* tables, const kv_klt_split* splits,
                                       const uint8_t* payload, const uint32_t* offsets,
                                       const int32_t* coarse_symbols, const uint8_t* classes,
                                       int32_t* symbols, int32_t* status) {
  return klt_decode_blocks(chunk, payload, offsets, status, [&](const KltCoded& coded) {
    const kv_klt_group* below = &coarse[coded.index];
    return kv_klt_decode_refinement_block(
        coded.group, below->num_components, chunk->components, tables->entries, splits, coded.words,
        coded.num_words, coarse_symbols + below->coefficients + coded.first,
        classes + coded.index * chunk->num_tokens + coded.first, coded.tokens,
        symbols + coded.group->coefficients + coded.first, (uint64_t)chunk->num_tokens);
  });
}

// Symbols [group][component][token] to coefficients of the same shape.
KV_EXPORT int kv_klt_dequantize(const kv_klt_chunk* chunk, const int32_t* symbols,
                                const uint8_t* classes, const float* step, float* coefficients) {
  const int64_t tokens = chunk->num_tokens;
  return for_each_block<NoScratch>(
      chunk->num_groups, (int)chunk->num_threads, 0, [&](int64_t g, NoScratch&) {
        const kv_klt_group* group = &chunk->groups[g];
        for (uint32_t c = 0; c < group->num_components; ++c) {
          const int64_t at = (int64_t)group->coefficients + c * tokens;
          for (int64_t t = 0; t < tokens; ++t)
            coefficients[at + t] =
                (float)symbols[at + t] * (*step * kv_klt_class_scale(classes[g * tokens + t]));
        }
      });
}

// Coefficients [component][token] to symbols of the level that is `thirds` times a third of the one with this
// step, in which a token's steps are divided by 2^(class - neutral).
KV_EXPORT int kv_klt_quantize(const float* coefficients, const uint8_t* classes, int64_t num_components,
                              int64_t num_tokens, const float* step, int64_t thirds, int16_t* symbols,
                              int64_t num_threads) {
  const float inverse = 1.0f / *step;
  return for_each_block<NoScratch>(num_components, (int)num_threads, 0, [&](int64_t c, NoScratch&) {
    const float* from = coefficients + c * num_tokens;
    int16_t* to = symbols + c * num_tokens;
    int32_t tile[256];
    for (int64_t first = 0; first < num_tokens; first += 256) {
      const int64_t count = num_tokens - first < 256 ? num_tokens - first : 256;
      for (int64_t t = 0; t < count; ++t) {
        // 2^(class - neutral), exactly
        float gain = kv_float_of_bits((127u - KV_KLT_NEUTRAL_CLASS + classes[first + t]) << 23);
        tile[t] = kv_klt_finest(from[first + t], inverse * gain);
      }
      for (int64_t k = 0; k < thirds; ++k)
        for (int64_t t = 0; t < count; ++t) tile[t] = kv_klt_third(tile[t]);
      for (int64_t t = 0; t < count; ++t) to[first + t] = kv_klt_symbol(tile[t]);
    }
  });
}

// The rotary tables of a chunk. The same fields as KltRows in codec/klt_native.py.
struct kv_klt_rows {
  const float* mean;      // [layer, kv, channel]
  const float* weight;    // [layer, kv, channel]: what values are multiplied with before the transform
  const float* inverse;   // [layer, kv, channel]: 1 / weight
  const float* cosine;    // [table, token, half]: of the chunk's tokens
  const float* sine;
  const int32_t* table_of_layer;
  int64_t num_tables, half, interleaved;
  int64_t num_heads, head_dim, num_tokens, is_half, num_threads;
};

namespace {

// Turns the first 2 * half numbers of a head forward (sign 1) or back (sign -1).
void klt_rotate(const kv_klt_rows* r, int64_t layer, int64_t token, float sign, float* head) {
  const int64_t at = (r->table_of_layer[layer] * r->num_tokens + token) * r->half;
  const float* cosine = r->cosine + at;
  const float* sine = r->sine + at;
  for (int64_t i = 0; i < r->half; ++i) {
    float* first = head + (r->interleaved ? 2 * i : i);
    float* second = head + (r->interleaved ? 2 * i + 1 : i + r->half);
    float a = *first, b = *second, s = sign * sine[i];
    *first = a * cosine[i] - b * s;
    *second = b * cosine[i] + a * s;
  }
}

}  // namespace

// kv [layer, kv, token, head, dim] of layers first_layer.. to rows [token][layer, kv, channel]: keys
// turned back, minus the mean, times the weight. layer0 rows are made the same way with turned = 0.
KV_EXPORT int kv_klt_gather(const kv_klt_rows* r, const void* kv, int64_t first_layer,
                            int64_t num_layers, int64_t turned, float* rows) {
  const int64_t channels = r->num_heads * r->head_dim;
  return for_each_block<NoScratch>(r->num_tokens, (int)r->num_threads, 0, [&](int64_t t, NoScratch&) {
    float* to = rows + t * num_layers * 2 * channels;
    for (int64_t side = 0; side < 2 * num_layers; ++side, to += channels) {
      const int64_t layer = first_layer + side / 2, plane = layer * 2 + side % 2;
      const int64_t source = turned ? plane : side;  // a layer-0 array holds only its own planes
      load_row(kv, (source * r->num_tokens + t) * channels, r->is_half != 0, (uint32_t)channels, to);
      if (turned && side % 2 == 0)
        for (int64_t h = 0; h < r->num_heads; ++h) klt_rotate(r, layer, t, -1.0f, to + h * r->head_dim);
      const float* mean = r->mean + plane * channels;
      const float* weight = r->weight + plane * channels;
      for (int64_t c = 0; c < channels; ++c) to[c] = (to[c] - mean[c]) * weight[c];
    }
  });
}

// The way back: rows (changed on the way) into kv.
KV_EXPORT int kv_klt_scatter(const kv_klt_rows* r, float* rows, int64_t first_layer,
                             int64_t num_layers, void* kv) {
  const int64_t channels = r->num_heads * r->head_dim;
  return for_each_block<NoScratch>(r->num_tokens, (int)r->num_threads, 0, [&](int64_t t, NoScratch&) {
    float* from = rows + t * num_layers * 2 * channels;
    for (int64_t side = 0; side < 2 * num_layers; ++side, from += channels) {
      const int64_t layer = first_layer + side / 2, plane = layer * 2 + side % 2;
      const float* mean = r->mean + plane * channels;
      const float* inverse = r->inverse + plane * channels;
      for (int64_t c = 0; c < channels; ++c) from[c] = from[c] * inverse[c] + mean[c];
      if (side % 2 == 0)
        for (int64_t h = 0; h < r->num_heads; ++h) klt_rotate(r, layer, t, 1.0f, from + h * r->head_dim);
      store_row(kv, (plane * r->num_tokens + t) * channels, r->is_half != 0, (uint32_t)channels, from);
    }
  });
}

// How often each table would code each value, for calibration: counts[table][256], value v at index v + 127,
// all beyond at 255. Only tables of components are counted. Not threaded: callers split by tokens.
KV_EXPORT int kv_klt_count(const kv_klt_chunk* chunk, const int16_t* symbols, const uint8_t* classes,
                           int64_t* counts) {
  for (int64_t g = 0; g < chunk->num_groups; ++g) {
    const kv_klt_group* group = &chunk->groups[g];
    const kv_klt_component* components = chunk->components + group->first_component;
    const uint8_t* token_class = classes + g * chunk->num_tokens;
    std::vector<int32_t> activity((size_t)chunk->num_tokens);
    for (int64_t t = 0; t < chunk->num_tokens; ++t)
      activity[t] = kv_klt_start_activity(group->start_activity, token_class[t]);
    for (uint32_t c = 0; c < group->num_components; ++c) {
      const int16_t* row = symbols + group->coefficients + (int64_t)c * chunk->num_tokens;
      for (int64_t t = 0; t < chunk->num_tokens; ++t) {
        uint32_t table = components[c].first_table + kv_klt_context(&components[c], activity[t]);
        int32_t place = row[t] + 127;
        counts[(int64_t)table * 256 + (place >= 0 && place < 255 ? place : 255)] += 1;
        activity[t] = kv_klt_next_activity(activity[t], row[t]);
      }
    }
  }
  return KV_OK;
}

// The published codec's transform, for one block (one layer, K or V, one head, one span of tokens):
// groups of 10 tokens, the first of each is the anchor at 8 bits, the others are coded as their distance
// from the decoded anchor. docs/bitstream.md, section "cachegen".
//
// Symbols of a block lie channel by channel, [dim][stride]: first the channel's anchors in order, then its
// deltas in token order. Each is one run of the entropy coder.
#ifndef KV_CACHEGEN_H
#define KV_CACHEGEN_H

#include "portable.h"
#include "quantize.h"

#define KV_GROUP_TOKENS 10

KV_FN uint32_t kv_num_groups(uint32_t num_tokens) {
  return (num_tokens + KV_GROUP_TOKENS - 1u) / KV_GROUP_TOKENS;
}

// Where the symbol of a token lies among those of its channel.
KV_FN uint32_t kv_symbol_place(uint32_t token, uint32_t num_groups) {
  uint32_t group = token / KV_GROUP_TOKENS;
  uint32_t member = token % KV_GROUP_TOKENS;
  return member == 0 ? group : num_groups + group * (KV_GROUP_TOKENS - 1u) + member - 1u;
}

KV_FN int32_t kv_anchor_symbol(float value, float anchor_step) {
  return kv_quantize(value, 1.0f / anchor_step);
}

KV_FN float kv_anchor_value(int32_t symbol, float anchor_step) { return (float)symbol * anchor_step; }

KV_FN int32_t kv_delta_symbol(float value, float anchor, float delta_step) {
  return kv_quantize(value - anchor, 1.0f / delta_step);
}

#endif

// Prefetching: while a thread computes, the keys and values that it reads next are prefetched into the second-level
// cache, token by token in the pool's order, for all heads of a tile. It goes in small steps, because a processor with
// more outstanding lines than it can track computes nothing until they come.
#pragma once

#include "attention_call.h"

namespace carousel {

// Keys and values of one split of a tile, to be prefetched while `work` is done.
class Ahead {
 public:
  void aim_at_nothing() { num_left_ = 0; }

  template <class T>
  void aim(const AttentionCall& call, const Tile& tile, int split, int work) {
    const KeyRange keys(call, tile, split);
    num_left_ = (int)(keys.end - keys.first);
    tokens_per_work_ = (((int64_t)num_left_ << kShift) + work - 1) / work;
    due_ = 0;
    const int64_t head_bytes = call.head_dim * (int64_t)sizeof(T);
    token_bytes_ = call.num_kv_heads * head_bytes;
    tile_bytes_ = (int)(tile.num_heads * head_bytes);
    k_pool_ = (const char*)call.k_pool + tile.kv_head * head_bytes;
    v_pool_ = (const char*)call.v_pool + tile.kv_head * head_bytes;
    page_size_ = call.page_size;
    page_ = call.page_table + call.rows[tile.seq] * call.page_table_stride + keys.first / page_size_;
    enter_page((int)(keys.first % page_size_));
  }

  // Prefetches for `work`, which will be done before the next call.
  void advance(int work) {
    if (num_left_ == 0) return;
    for (due_ += work * tokens_per_work_; due_ >= 1 << kShift; due_ -= 1 << kShift) {
      for (int byte = 0; byte < tile_bytes_; byte += kPrefetchLine) __builtin_prefetch(k_ + byte, 0, kSecondCache);
      for (int byte = 0; byte < tile_bytes_; byte += kPrefetchLine) __builtin_prefetch(v_ + byte, 0, kSecondCache);
      if (--num_left_ == 0) return;
      k_ += token_bytes_;
      v_ += token_bytes_;
      if (--num_left_in_page_ == 0) enter_page(0);
    }
  }

 private:
  static constexpr int kSecondCache = 2;
  static constexpr int kShift = 16;  // the fraction of a token that is left over

  void enter_page(int offset) {
    const int64_t slot = (int64_t)*page_++ * page_size_ + offset;
    k_ = k_pool_ + slot * token_bytes_;
    v_ = v_pool_ + slot * token_bytes_;
    num_left_in_page_ = page_size_ - offset;
  }

  int num_left_ = 0;  // tokens
  int num_left_in_page_ = 0;
  int page_size_ = 0;
  int tile_bytes_ = 0;
  int64_t token_bytes_ = 0;
  int64_t tokens_per_work_ = 0, due_ = 0;
  const int32_t* page_ = nullptr;  // the next one
  const char *k_pool_ = nullptr, *v_pool_ = nullptr, *k_ = nullptr, *v_ = nullptr;
};

}  // namespace carousel

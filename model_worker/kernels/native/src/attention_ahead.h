// Memory answers slowly: what a thread reads next is asked for while it computes, into the second cache, a token at a
// time as it lies in the pool, for all heads of a tile. Little by little: a processor that has asked for more lines than
// it can await computes nothing until they come.
#pragma once

#include "attention_call.h"

namespace carousel {

// The keys and values of one split of a tile, to be asked for while `work` is done.
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

  // So much of the work will have been done when this is called next.
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
  static constexpr int kShift = 16;  // of numbers of tokens that are not whole

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

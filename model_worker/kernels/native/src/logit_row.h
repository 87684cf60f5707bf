// One row of logits for the sampler: divided by a temperature, in blocks whose maximums are known, so that a search
// for few ids skips most of the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace carousel {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class LogitRow {
 public:
  static constexpr int kBlock = 64;

  // `largest` is memory for the row's use, for one row at a time.
  LogitRow(const float* logits, int size, float temperature, std::vector<float>& largest)
      : logits_(logits), size_(size), temperature_(temperature), largest_(largest) {
    largest_.resize((size + kBlock - 1) / kBlock);
    vint strange = {};
    for (int block = 0; block < num_blocks(); ++block) {
      float x[kBlock];
      load_block(block, x);
      vfloat most = load(x);
      for (int i = 0; i < kBlock; i += kLanes) {
        const vfloat value = load(x + i);
        strange |= value != value;
        most = max(most, value);
      }
      largest_[block] = max_of(most);
      highest_ = std::max(highest_, largest_[block]);
    }
    for (int lane = 0; lane < kLanes; ++lane) has_nan_ |= strange[lane] != 0;
  }

  int size() const { return size_; }
  int num_blocks() const { return (int)largest_.size(); }
  const std::vector<float>& largest() const { return largest_; }  // of each block
  float highest() const { return highest_; }
  // No id is infinitely likely, and one is likely at all.
  bool is_sound() const { return !has_nan_ && std::isfinite(highest_); }

  // The block's logits divided by the temperature; -inf after the end of the row.
  void load_block(int block, float (&out)[kBlock]) const {
    const float* from = logits_ + (int64_t)block * kBlock;
    const int count = std::min(kBlock, size_ - block * kBlock);
    if (count < kBlock) {
      std::fill(std::copy(from, from + count, out), out + kBlock, -kInfinity);
      from = out;
    }
    for (int i = 0; i < kBlock; i += kLanes) store(out + i, load(from + i) / temperature_);
  }

 private:
  const float* logits_;
  int size_;
  float temperature_;
  std::vector<float>& largest_;
  float highest_ = -kInfinity;
  bool has_nan_ = false;
};

}  // namespace carousel

// What a bf16 linear layer is asked, for CPUs that multiply pairs of bf16.
#pragma once

#include <cstdint>

#include "activation.h"
#include "panels.h"
#include "simd.h"

namespace carousel {

// The binding mirrors it field by field.
struct LinearCall {
  const bf16* x;           // [num_rows, k]
  const uint32_t* weight;  // packed [n, k]
  const bf16* bias;        // [n], or null
  void* out;               // [num_rows, n], or [num_rows, n / 2] with a gate
  int32_t num_rows;
  int32_t n;
  int32_t k;
  int32_t out_is_float;  // float32 instead of bf16
  int32_t gate;  // 0, or 1 + the Activation of W's first half, which multiplies its second; then out is bf16
  int32_t num_threads;

#if defined(__AVX512BF16__)
  // Output of one row and one panel.
  void write(int row, int panel, vfloat y) const {
    const int64_t at = (int64_t)row * n + panel * kPanel;
    if (bias) y += load(bias + panel * kPanel);
    if (out_is_float) {
      store((float*)out + at, y);
    } else {
      _mm256_storeu_si256((__m256i*)((bf16*)out + at), (__m256i)_mm512_cvtneps_pbh((__m512)y));
    }
  }
#endif
};

#if defined(__AVX512BF16__)

// Output of rows that follow each other, of two panels: a panel and the next one, or with a gate of the same one
// of both halves.
class PairWriter {
 public:
  PairWriter(const LinearCall& call, int row, int panel)
      : bias_(call.bias ? call.bias + panel * kPanel : nullptr),
        right_bias_(bias_ ? bias_ + (call.gate ? call.n / 2 : kPanel) : nullptr),
        gate_(call.gate),
        is_float_(call.out_is_float),
        stride_((int64_t)(call.gate ? call.n / 2 : call.n) * (is_float_ ? sizeof(float) : sizeof(bf16))),
        out_((char*)call.out + row * stride_ + panel * kPanel * (is_float_ ? sizeof(float) : sizeof(bf16))) {}

  void write(vfloat left, vfloat right) {
    if (bias_) {
      left += load(bias_);
      right += load(right_bias_);
    }
    if (gate_) {
      store((bf16*)out_, through_gate(rounded_to<bf16>(left), rounded_to<bf16>(right)));
    } else if (is_float_) {
      store((float*)out_, left);
      store((float*)out_ + kPanel, right);
    } else {
      _mm512_storeu_si512(out_, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
    }
    out_ += stride_;
  }

 private:
  vfloat through_gate(vfloat gate, vfloat up) const {
    switch (gate_ - 1) {
      case kSilu: return gated<bf16, kSilu>(gate, up);
      case kGelu: return gated<bf16, kGelu>(gate, up);
      default: return gated<bf16, kGeluTanh>(gate, up);
    }
  }

  const bf16* bias_;
  const bf16* right_bias_;
  int gate_;
  bool is_float_;
  int64_t stride_;
  char* out_;
};

#endif

}  // namespace carousel

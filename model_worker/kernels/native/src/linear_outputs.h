// Sums of a task of a linear layer, some rows by some panels, and their conversion to outputs.
#pragma once

#include "linear_call.h"

namespace carousel {

constexpr int kVectors = kPanel / kLanes;  // of a panel
constexpr int kTaskPanels = 16;            // maximum of a task
constexpr int kSumStride = kTaskPanels * kPanel;

// T: an element of bias and output.
template <class T>
struct TaskOutputs {
  const LinearCall& call;
  int row;  // the first one
  int num_rows;
  int panel;       // the first one
  int num_panels;  // with a gate, counted over both halves
  float* sums;     // [num_rows, kSumStride] of 32 bits

  // The task's panels in the order of their sums: with a gate, each one beside its other half.
  int panel_at(int i) const {
    return call.gate ? panel + i / 2 + (i % 2 ? call.n / 2 / kPanel : 0) : panel + i;
  }

  // Converts exact sums of int8 to the values that they represent.
  void scale(int offset) const {
    for (int i = 0; i < num_panels; ++i) {
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        const int64_t column = panel_at(i) * kPanel + lane;
        vint of_weights;
        std::memcpy(&of_weights, call.weight_sum + column, sizeof of_weights);
        const vfloat factor = load(call.weight_scale + column);
        for (int r = 0; r < num_rows; ++r) {
          float* at = sums + r * kSumStride + i * kPanel + lane;
          const vint sum = (vint)load(at) - of_weights * offset;
          store(at, __builtin_convertvector(sum, vfloat) * (factor * call.x_scale[row + r]));
        }
      }
    }
  }

  void write() const {
    const int full = call.gate ? num_panels : std::min(num_panels, call.n / kPanel - panel);
    int i = 0;
    for (; i + 2 <= full; i += 2) {
      PairWriter<T> writer(call, row, panel_at(i));
      for (int r = 0; r < num_rows; ++r) {
        const float* at = sums + r * kSumStride + i * kPanel;
        writer.write(at, at + kPanel);
      }
    }
    for (; i < num_panels; ++i) {
      for (int r = 0; r < num_rows; ++r) {
        const float* at = sums + r * kSumStride + i * kPanel;
        if (i == full) {
          write_last_panel<T>(call, row + r, panel_at(i), at);
          continue;
        }
        for (int lane = 0; lane < kPanel; lane += kLanes) {
          write_panel<T>(call, row + r, panel_at(i), lane, load(at + lane));
        }
      }
    }
  }
};

}  // namespace carousel

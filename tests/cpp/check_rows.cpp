// Rows of tables, packed ones and int8, and rotary angles.
#include "check.h"
#include "rows.cpp"

namespace {

using namespace carousel;

template <class T>
void check_take(int word_bytes) {
  const int n = 37, k = 20, count = 5;
  const std::vector<int64_t> ids{36, 0, 15, 16, 36};
  std::vector<int8_t> table(48 * k);
  for (int i = 0; i < n * k; ++i) table[i] = (int8_t)(i * 7 % 255 - 127);
  std::vector<float> scale;
  for (int i = 0; i < n; ++i) scale.push_back(0.5f + i);
  std::vector<int8_t> plain;
  std::vector<double> expected;
  for (int64_t id : ids) {
    for (int c = 0; c < k; ++c) {
      plain.push_back(table[id * k + c]);
      expected.push_back(to_float(check::narrow<T>(table[id * k + c] * scale[id])));
    }
  }
  if (word_bytes) carousel_pack_panels(table.data(), n, k, word_bytes, 1);
  std::vector<int8_t> bytes(count * k);
  std::vector<T> out(count * k);
  TakeCall call{table.data(), ids.data(), nullptr, bytes.data(), k, count, word_bytes, 0, 1};
  carousel_take(&call);
  check::equal("take", bytes, plain);
  call.row_scale = scale.data(), call.out = out.data(), call.dtype = check::kType<T>;
  carousel_take(&call);
  check::near("take, int8", out, expected, 1e-7);
}

}  // namespace

void check_rows() {
  for (int word_bytes : {0, 2, 4}) {
    check_take<float>(word_bytes);
    check_take<bf16>(word_bytes);
    check_take<fp16>(word_bytes);
  }
  const int tokens = 4, half = 10;
  const std::vector<int64_t> positions{0, 1, 777, 1000003};
  std::vector<float> frequencies, amplitude, out(tokens * 2 * half);
  for (int i = 0; i < half; ++i) frequencies.push_back((float)std::pow(10000.0, -i / (double)half));
  for (int i = 0; i < 2 * half; ++i) amplitude.push_back(1 + 0.1f * i);
  std::vector<double> expected;
  for (int64_t position : positions) {
    for (int i = 0; i < 2 * half; ++i) {
      const double angle = (float)position * frequencies[i % half];
      expected.push_back((i < half ? std::cos(angle) : std::sin(angle)) * amplitude[i]);
    }
  }
  RotaryCall call{positions.data(), frequencies.data(), amplitude.data(), out.data(), tokens, half, 2};
  carousel_rotary(&call);
  check::near("rotary", out, expected, 1e-6);
}

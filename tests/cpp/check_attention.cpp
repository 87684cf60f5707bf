// Attention of a prompt, a chunk and decodes, which rotates and stores keys and values.
#include "attention.cpp"
#include "check.h"

namespace {

using namespace carousel;

template <class T>
std::vector<double> rotated(const std::vector<T>& x, const std::vector<float>& cos_sin, int heads, int dim) {
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t c = i % dim, half = dim / 2, token = i / dim / heads;
    const double own = to_float(x[i]), other = to_float(c < half ? x[i + half] : x[i - half]);
    const double cosine = cos_sin[token * dim + c % half], sine = cos_sin[token * dim + half + c % half];
    out[i] = to_float(check::narrow<T>((float)(c < half ? own * cosine - other * sine : own * cosine + other * sine)));
  }
  return out;
}

template <class T>
void check_step(int dim, int window, float softcap) {
  constexpr int kHeads = 4, kKvHeads = 2, kPageSize = 16, kPages = 24;
  const std::vector<int64_t> rows{2, 0, 1}, kv_lens{70, 300, 9}, query_start{0, 70, 71, 76};
  const int tokens = 76, width = kKvHeads * dim;
  std::vector<int32_t> table(3 * kPages);
  for (size_t i = 0; i < table.size(); ++i) table[i] = (int32_t)(i * 5 % table.size());
  const auto q = check::narrow<T>(check::normal(tokens * kHeads * dim, 1));
  const auto k = check::narrow<T>(check::normal(tokens * width, 2));
  const auto v = check::narrow<T>(check::normal(tokens * width, 3));
  const size_t pool_size = table.size() * kPageSize * width;
  auto k_pool = check::narrow<T>(check::normal(pool_size, 4)), v_pool = check::narrow<T>(check::normal(pool_size, 5));
  std::vector<float> cos_sin;
  std::vector<int64_t> out_slots;
  for (int s = 0; s < 3; ++s) {
    for (int64_t t = query_start[s]; t < query_start[s + 1]; ++t) {
      const int64_t at = kv_lens[s] - (query_start[s + 1] - t);
      out_slots.push_back(table[rows[s] * kPages + at / kPageSize] * kPageSize + at % kPageSize);
      for (int c = 0; c < dim; ++c) {
        const double angle = at * std::pow(100.0, -(c % (dim / 2)) / (dim / 2.0));
        cos_sin.push_back((float)(c < dim / 2 ? std::cos(angle) : std::sin(angle)));
      }
    }
  }
  auto keys = check::wide(k_pool), values = check::wide(v_pool);
  const auto turned_q = rotated(q, cos_sin, kHeads, dim), turned_k = rotated(k, cos_sin, kKvHeads, dim);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < width; ++c) {
      keys[out_slots[t] * width + c] = turned_k[t * width + c];
      values[out_slots[t] * width + c] = to_float(v[t * width + c]);
    }
  }
  const double scale = 1 / std::sqrt((double)dim);
  std::vector<double> expected;
  for (int s = 0; s < 3; ++s) {
    for (int64_t t = query_start[s]; t < query_start[s + 1]; ++t) {
      const int64_t end = kv_lens[s] - (query_start[s + 1] - t) + 1, first = window && end > window ? end - window : 0;
      for (int head = 0; head < kHeads; ++head) {
        std::vector<double> sum(dim);
        double total = 0;
        for (int64_t j = first; j < end; ++j) {
          const int64_t slot = table[rows[s] * kPages + j / kPageSize] * kPageSize + j % kPageSize;
          const int64_t at = slot * width + head / (kHeads / kKvHeads) * dim;
          double score = 0;
          for (int c = 0; c < dim; ++c) score += turned_q[(t * kHeads + head) * dim + c] * keys[at + c] * scale;
          if (softcap > 0) score = softcap * std::tanh(score / softcap);
          total += std::exp(score);
          for (int c = 0; c < dim; ++c) sum[c] += std::exp(score) * values[at + c];
        }
        for (double each : sum) expected.push_back(each / total);
      }
    }
  }
  for (bool is_deterministic : {false, true}) {
    std::vector<T> out(q.size());
    AttentionCall call{};
    call.q = q.data(), call.k = k.data(), call.v = v.data(), call.out = out.data();
    call.k_pool = k_pool.data(), call.v_pool = v_pool.data(), call.cos_sin = cos_sin.data();
    call.out_slots = out_slots.data(), call.page_table = table.data(), call.rows = rows.data();
    call.kv_lens = kv_lens.data(), call.query_start = query_start.data(), call.q_stride = kHeads * dim;
    call.k_stride = call.v_stride = width, call.page_table_stride = kPages, call.num_tokens = tokens, call.num_seqs = 3;
    call.page_size = kPageSize, call.num_heads = kHeads, call.num_kv_heads = kKvHeads, call.head_dim = dim;
    call.window = window, call.dtype = check::kType<T>, call.num_threads = 2;
    call.scale = (float)scale, call.softcap = softcap, call.deterministic = is_deterministic;
    carousel_attention(&call);
    check::near("attention", out, expected, check::kStep<T>);
    check::near("attention, keys", k_pool, keys, check::kStep<T>);
    check::near("attention, values", v_pool, values, 1e-7);
  }
}

}  // namespace

void check_attention() {
  for (int dim : {16, 64}) {
    check_step<float>(dim, 0, 0);
    check_step<float>(dim, 33, 5);
    check_step<bf16>(dim, 0, 0);
    check_step<fp16>(dim, 0, 0);
    check_step<bf16>(dim, 33, 5);
    check_step<fp16>(dim, 33, 5);
  }
}

// The pool computes every item once, with any number of threads, and the workers' writes are visible afterwards.
#include "threads.hpp"

#include "tests/harness.hpp"

namespace twostroke::tests {

void test_threads() {
  for (int threads : {1, 2, 5, 1, 3}) {
    set_num_threads(threads);
    expect(num_threads() == threads, text("num_threads after set_num_threads(", threads, ")"));
    for (int64_t count : {0, 1, 2, 7, 64, 1000})
      for (int64_t grain : {1, 3, 2000}) {
        std::vector<int32_t> visits((size_t)count);
        for (int round = 0; round < 20; round++)
          parallel(count, grain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) visits[(size_t)i]++;
          });
        bool each_once = true;
        for (int32_t n : visits) each_once = each_once && n == 20;
        expect(each_once, text("parallel: threads=", threads, " count=", count, " grain=", grain));
      }
  }
  set_num_threads(1);
}

}  // namespace twostroke::tests

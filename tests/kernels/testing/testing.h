// A small test registry for tests of C++ and CUDA code. Plain C++: needs no GPU.
//
//   ASTRAI_TEST(rotates_one_pair) { EXPECT_EQ(f(1), 2); }
//
// Link testing_main.cc. Each case is printed with its result and written to the JUnit file that
// Bazel names in $XML_OUTPUT_FILE, so that cases are counted and not only targets.
// Options: --filter=TEXT (or Bazel's --test_filter) runs the cases whose name contains TEXT;
// ASTRAI_TEST_SEED=N repeats a run that printed "seed N".
#pragma once

#include <cstdint>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace astrai::testing {

struct TestCase {
  const char* name;
  void (*body)();
};

std::vector<TestCase>& registry();

struct Registration {
  Registration(const char* name, void (*body)()) { registry().push_back({name, body}); }
};

// Records a failure of the running case; the case goes on.
void add_failure(const char* file, int line, const std::string& message);

// Thrown to leave a case: as failed (Abort) or as skipped with its reason (Skip).
struct Abort : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Text added to every failure while it lives: the random shape under test, for instance.
class Context {
 public:
  explicit Context(std::string text);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

// A generator seeded from the run's seed and the case's name, so that a case repeats alone.
class Rng {
 public:
  Rng();
  // Uniform over lo..hi, both included.
  int64_t integer(int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(engine_);
  }
  bool coin() { return integer(0, 1) == 1; }
  double uniform(double lo, double hi) {
    return std::uniform_real_distribution<double>(lo, hi)(engine_);
  }
  double normal() { return normal_(engine_); }
  template <typename T>
  T pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(integer(0, static_cast<int64_t>(from.size()) - 1))];
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

template <typename A, typename B, typename Relation>
void check_relation(const char* file, int line, const char* text, const A& a, const B& b,
                    Relation holds) {
  if (holds(a, b)) return;
  add_failure(file, line, std::string(text) + ", got " + show(a) + " and " + show(b));
}

}  // namespace astrai::testing

#define ASTRAI_TEST(name)                                                                      \
  static void astrai_test_##name();                                                            \
  static const ::astrai::testing::Registration astrai_registration_##name(#name,               \
                                                                          astrai_test_##name); \
  static void astrai_test_##name()

#define EXPECT_TRUE(condition)                                                          \
  do {                                                                                  \
    if (!(condition))                                                                   \
      ::astrai::testing::add_failure(__FILE__, __LINE__, "expected true: " #condition); \
  } while (false)
#define EXPECT_FALSE(condition)                                                          \
  do {                                                                                   \
    if (condition)                                                                       \
      ::astrai::testing::add_failure(__FILE__, __LINE__, "expected false: " #condition); \
  } while (false)

#define ASTRAI_EXPECT_RELATION(a, op, b)                                                         \
  ::astrai::testing::check_relation(__FILE__, __LINE__, "expected " #a " " #op " " #b, (a), (b), \
                                    [](const auto& x, const auto& y) { return x op y; })
#define EXPECT_EQ(a, b) ASTRAI_EXPECT_RELATION(a, ==, b)
#define EXPECT_NE(a, b) ASTRAI_EXPECT_RELATION(a, !=, b)
#define EXPECT_LE(a, b) ASTRAI_EXPECT_RELATION(a, <=, b)
#define EXPECT_LT(a, b) ASTRAI_EXPECT_RELATION(a, <, b)
#define EXPECT_GE(a, b) ASTRAI_EXPECT_RELATION(a, >=, b)
#define EXPECT_GT(a, b) ASTRAI_EXPECT_RELATION(a, >, b)

// Leaves the case if false: for what the rest of it depends on.
#define REQUIRE(condition)                                                                  \
  do {                                                                                      \
    if (!(condition))                                                                       \
      throw ::astrai::testing::Abort(std::string(__FILE__ ":") + std::to_string(__LINE__) + \
                                     ": required: " #condition);                            \
  } while (false)

#define SKIP_CASE(reason) throw ::astrai::testing::Skip(reason)

# hack/sum.sh: for scripts that run tests. Not a program.

# Reads the output of `cargo test -- --show-output` and sums it up. Lines go through as they come, but of what passing tests
# wrote only "skipped: ..." is shown, with the test's name. (Not awk: Debian's reads ahead, so nothing would be seen for minutes.)
sum_up() {
  local line name='' last='' quiet='' passed=0 failed=0 ignored=0 skipped=0
  while IFS= read -r line; do
    case $line in
      'successes:') quiet=1 ;;
      'failures:' | 'test result: '*) quiet='' ;;
      '---- '*' stdout ----') name=${line#---- } name=${name% stdout ----} ;;
    esac
    if [ -n "$quiet" ]; then
      [[ $line == 'skipped: '* ]] || continue
      if [ "$name" != "$last" ]; then skipped=$((skipped + 1)) last=$name; fi
      line="$name $line"
    fi
    printf '%s\n' "$line"
    if [[ $line =~ ^test\ result:.*\ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored ]]; then
      passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) ignored=$((ignored + BASH_REMATCH[3])) last=''
    fi
  done
  echo "$((passed - skipped)) passed, $failed failed, $((skipped + ignored)) skipped"
}

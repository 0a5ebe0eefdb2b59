"""Shell scripts that run inside containers. They need a POSIX shell and what busybox or coreutils have."""

from ._commands import WORK

FIRST_PROCESS = 'trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done'
"""PID 1: reaps orphans, ends at once when it is asked to, and outlives `kill -KILL -1`."""

RUN = f'ulimit -c 0; cd {WORK} || exit 126; exec "$@"'
"""Runs a command, so that a missing one ends with 127 and the shell's message, whatever the engine. The
engine itself would not start one in a directory that may not be entered."""

NEEDED = ("cat", "chmod", "dd", "find", "head", "mkdir", "rm", "sleep", "tar")
"""Commands that the scripts, and environments, use."""

WRITE = """
umask 022
while IFS= read -r size && IFS= read -r path; do
  mkdir -p "${path%/*}/" || exit 1
  if [ "$size" = 0 ]; then dd if=/dev/null of="$path" || exit 1
  else dd bs="$size" count=1 iflag=fullblock of="$path" || exit 1
  fi
  echo
done
"""
"""Reads a length, a path and so many bytes, over and over. Writes a line a file that is done. `dd` takes no
byte more than it is told, keeps the mode of the file, and follows links."""

NO_FILE, IS_DIRECTORY, NOT_READABLE, NOT_REGULAR = 3, 4, 5, 6
READ = f"""
if [ ! -e "$1" ]; then exit {NO_FILE}; fi
if [ -d "$1" ]; then exit {IS_DIRECTORY}; fi
if [ ! -f "$1" ]; then exit {NOT_REGULAR}; fi
if [ ! -r "$1" ]; then exit {NOT_READABLE}; fi
exec head -c "$2" "$1"
"""
"""`$2` bytes of the file `$1`."""

CLEAR = r"""
kill -KILL -1 2>/dev/null
user=$(id -u)
empty() {
  chmod u+rwx "$1" 2>/dev/null
  find "$1" -xdev ! -path "$1" -user "$user" -type d ! -perm -700 -exec chmod u+rwx {} \;
  find "$1" -xdev ! -path "$1" -user "$user" ! -type c -prune -exec rm -rf {} +
  left=$(find "$1" -xdev ! -path "$1" -user "$user" ! -type c | head -n 1)
  [ -z "$left" ] || { echo "cannot delete $left"; exit 1; }
  chmod 1777 "$1" 2>/dev/null
}
while read -r _ dir kind options _; do
  case $kind in proc|sysfs|devpts|cgroup|cgroup2|devtmpfs) continue ;; esac
  case ,$options, in *,rw,*) ;; *) continue ;; esac
  [ -d "$dir" ] || continue
  for kept in "$@"; do [ "$kept" = "$dir" ] && continue 2; done
  empty "$dir" 2>/dev/null </dev/null
done </proc/self/mounts
for kind in shm sem msg; do
  lines=0
  while read -r _; do lines=$((lines + 1)); done 2>/dev/null </proc/sysvipc/$kind
  [ $lines -le 1 ] || { echo "System V objects are left ($kind)"; exit 1; }
done
tries=0
while :; do
  alive=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] && continue
    read -r stat 2>/dev/null <"$folder/stat" || continue
    after=${stat##*) }
    case $after in Z*|X*) continue ;; esac
    parent=${after#? }; parent=${parent%% *}
    [ "$parent" = 1 ] && case $stat in *"(sleep)"*) continue ;; esac
    alive=$pid
  done
  [ -n "$alive" ] || break
  tries=$((tries + 1))
  [ $tries -lt 50 ] || { echo "processes are left"; exit 1; }
  sleep 0.1
done
echo clean
"""
"""Kills all processes, deletes all files of the user but those below the arguments, and looks whether any is
left. The last line is `clean`."""

CLEARED = b"clean\n"

#!/bin/busybox sh
# The guest's first process: makes a Device-DAX device of its NVDIMM and runs test programs of kv-cxl and kv-connector on it.
/bin/busybox --install -s /bin
export PATH=/bin LD_LIBRARY_PATH=/lib RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run

word() { sed -n "s/.*kvbraid\.$1=\([a-z0-9]*\).*/\1/p" /proc/cmdline; }
wait_for() { tries=0; while [ ! -e "$1" ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done; }
run() { echo "     Running tests/$1.rs (guest/$1-0)"; "$@" --test-threads=1 --show-output; }
die() { echo "GUEST failed: $1"; dmesg | tail -30; poweroff -f; sleep 60; }

echo "GUEST $(uname -r), up $(cut -d' ' -f1 /proc/uptime) s"
while read -r module; do insmod "/modules/$module" || echo "GUEST cannot load $module"; done < /modules/order
if [ "$(word phase)" = tests ]; then
    wait_for /sys/bus/nd/devices/namespace0.0
    ndctl create-namespace -f -e namespace0.0 -m devdax -a 2M > /tmp/ndctl 2>&1 || { cat /tmp/ndctl; die ndctl; }
fi
wait_for /dev/dax0.0
[ -e /dev/dax0.0 ] || die "there is no /dev/dax0.0"
echo "GUEST has /dev/dax0.0, up $(cut -d' ' -f1 /proc/uptime) s"
export KVBRAID_DAX=/dev/dax0.0

case "$(word phase)" in
tests)
    run dax_device --skip store_until_killed --skip a_device_that_is_system_ram
    run dax_ring
    daxctl reconfigure-device --mode=system-ram --no-online dax0.0 > /tmp/daxctl 2>&1 || cat /tmp/daxctl
    KVBRAID_DAX_SYSTEM_RAM=/dev/dax0.0 run dax_device --exact a_device_that_is_system_ram_says_how_to_get_it_back
    daxctl reconfigure-device --mode=devdax --force dax0.0 > /tmp/daxctl 2>&1 || cat /tmp/daxctl
    # A store of the second part of the device, whose process is killed; then an engine on the first part, killed with the
    # machine.
    KVBRAID_DAX_STORE=/dev/dax0.0 dax_device --exact store_until_killed > /tmp/stored 2>&1 &
    tries=0
    while ! grep -q "STORED 20" /tmp/stored && [ $tries -lt 300 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -9 $!
    wait $! 2> /dev/null
    sed -n 's/.*STORED \([0-9]*\)$/GUEST killed a store after \1/p' /tmp/stored | tail -1
    KVBRAID_FLASH=/dev/dax0.0 run dax_engine --exact an_engine_stores_claims_and_reads_on_a_device
    echo "GUEST stores, up $(cut -d' ' -f1 /proc/uptime) s"
    KVBRAID_FLASH=/dev/dax0.0 KVBRAID_FLASH_STORE=/dev/dax0.0 dax_engine --exact store_until_killed
    ;;
recover)
    KVBRAID_DAX_STORED=$(word killed) run dax_device --exact what_was_stored_before_a_kill_is_recovered_after_it
    KVBRAID_FLASH=/dev/dax0.0 KVBRAID_FLASH_STORED=$(word stored) run dax_engine --exact what_an_engine_had_stored_before_a_kill_is_found_again
    ;;
esac
echo "GUEST end, up $(cut -d' ' -f1 /proc/uptime) s"
poweroff -f
